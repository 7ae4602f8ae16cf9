"""Sends requests to clients, collects replies, and counts them."""
