"""Correlated noise over the rounds (matrix factorisation, DP-FTRL): factors and what they cost."""
