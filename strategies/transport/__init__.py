"""Transports of the answers: plain, or by a secure sum that opens only the sum."""
