"""Compares runs over their seeds: means with their standard errors, charts, and CSV."""
