"""Central DP: what cohorts and correlated noise leave of one budget."""
