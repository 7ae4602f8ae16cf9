"""Attacks that check what the docstrings promise, and what those of all schemes share."""
