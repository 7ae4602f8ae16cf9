"""Bounds of the cap of a loss that clients report."""

__all__ = ["LARGEST_CAP", "SMALLEST_CAP"]

SMALLEST_CAP, LARGEST_CAP = 1e-6, 1e6
