"""Samples where a process spends its time, for a profile: servers and nodes."""

__all__ = ["PROFILE_VARIABLE"]

PROFILE_VARIABLE = "FLWR_PRIVACY_PROFILE"
"""Environment variable with the folder in which each process keeps its samples."""
