"""The CNN with Flower's LocalDpMod."""
