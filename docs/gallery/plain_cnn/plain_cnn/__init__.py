"""A plain CNN on digits."""
