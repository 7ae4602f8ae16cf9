"""The tree of aggregators of M2FDP: its shape, its trusted nodes, its file, and its exchanges."""
