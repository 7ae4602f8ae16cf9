"""Attacks that check what the docstrings promise."""
