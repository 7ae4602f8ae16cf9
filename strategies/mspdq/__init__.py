"""MSP, MSPDQ and what they are compared with, on the server."""
