"""Requests to clients: who is asked, what came back, and what was counted."""
