"""Each paper's theory, numpy simulations, experiments and attacks; nothing here runs on a node."""
