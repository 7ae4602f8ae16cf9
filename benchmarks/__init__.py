"""Measurements of this library against named rivals; ``python -m benchmarks`` prints them."""
