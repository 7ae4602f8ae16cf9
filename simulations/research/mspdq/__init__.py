"""MSP and MSPDQ: bounds, attacks, and the figures of the paper."""
