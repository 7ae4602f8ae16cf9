"""Samples where a process spends its time, for a profile: servers and nodes."""

PROFILE_VARIABLE = "FLWR_PRIVACY_PROFILE"
"""Environment variable with the folder in which each process keeps its samples."""
