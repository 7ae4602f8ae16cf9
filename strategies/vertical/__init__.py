"""Vertical schemes on the server, whose clients own columns: FedVS and plain split learning."""
