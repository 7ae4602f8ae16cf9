"""UDP on the server: the strategy, its requests, and the validation loss of its schedules."""
