"""A run as data: its settings, schemes by name, and the folder that it leaves."""
