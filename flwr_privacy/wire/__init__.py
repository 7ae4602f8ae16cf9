"""Formats of messages and files: arrays, identities, sealed channels."""
