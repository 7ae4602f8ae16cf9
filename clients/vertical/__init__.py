"""Vertical schemes on the client, which owns columns: FedVS and plain split learning."""
