"""Tools for whoever runs a node or a server: ledgers, state folders, checks and metrics."""
