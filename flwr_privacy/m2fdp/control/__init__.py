"""How many steps and devices a round of M2FDP takes, and how often one device is among them."""
