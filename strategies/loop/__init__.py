"""The loop of all strategies: rounds, charges, and the step from a mean to a model."""
