"""Vertical schemes on the server, where clients own columns: FedVS and plain split learning."""
