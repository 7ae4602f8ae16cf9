"""How a run is carried out on an engine, and what a user sees meanwhile."""
