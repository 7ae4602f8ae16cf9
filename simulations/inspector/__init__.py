"""Reads a Flower app without running it: its kind, its halves, and what a scheme changes in it."""
