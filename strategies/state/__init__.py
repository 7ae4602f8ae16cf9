"""What outlives a run of a strategy: experiment, checkpoint, history, charges not settled yet."""
