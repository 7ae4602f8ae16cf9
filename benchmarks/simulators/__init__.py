"""Simulators side by side: pfl-research, plain Flower, a loop in PyTorch, and this library."""
