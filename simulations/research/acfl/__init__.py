"""ACFL: theory, numpy simulations, attacks, and the figures of the paper."""
