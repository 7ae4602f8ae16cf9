"""The controller of M2FDP: how many steps and devices a round takes, by noise, energy and delay."""
