"""M2FDP: numpy simulations, attacks, and the figures of the paper."""
