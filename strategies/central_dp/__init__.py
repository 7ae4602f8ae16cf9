"""Central DP on the server: the strategy, and what it charges."""
