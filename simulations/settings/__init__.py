"""Settings of a run, schemes by name, and the run folder."""
