"""Reproduces a paper's figures: trains the curves, draws them, and checks the claims."""
