"""Samples where a process spends its time, for a profile: servers and nodes."""
