"""The CNN with Flower's SecAgg+."""
