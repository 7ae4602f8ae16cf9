"""UDP on the server: the strategy, who takes part in a round, and who judges its model."""
