"""The state of a strategy that survives a run: experiment, checkpoint, history, open charges."""
