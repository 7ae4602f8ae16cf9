"""Reads how an app trains with torch: its training functions, the loop, and what is around it."""
