"""Attacks that test the guarantees, and code that the attacks of all schemes share."""
