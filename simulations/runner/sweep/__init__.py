"""Trains own models on own data from Python, over schemes, settings and seeds."""
