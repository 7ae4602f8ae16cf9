"""The work that all simulators do, and the Flower App that does it."""
