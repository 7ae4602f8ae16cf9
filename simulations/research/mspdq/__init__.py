"""MSP and MSPDQ: bounds, numpy simulations, attacks, and the figures of the paper."""
