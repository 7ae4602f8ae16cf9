"""MSP, MSPDQ and their baselines on the client."""
