"""ACFL on the server: the setup that codes data, and the strategy."""
