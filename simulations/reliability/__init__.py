"""Trains with injected faults: every fault in every phase, and random faults over many rounds."""
