"""The controller of M2FDP: chooses steps and devices of a round by noise, energy and delay."""
