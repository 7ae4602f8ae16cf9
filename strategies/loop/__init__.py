"""The loop that all strategies share: rounds, charges, and the step from a sum to a model."""
