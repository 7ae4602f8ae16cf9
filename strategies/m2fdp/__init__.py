"""M2FDP on the server: the strategy, the tree of a run, messages between aggregators."""
