"""UDP: theory, attacks, and the figures of the paper."""
