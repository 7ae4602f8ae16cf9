"""Carries out runs on an engine and shows their progress."""
