"""The tree of aggregators of M2FDP: its shape, who is trusted in it, and its file."""
