"""Bytes that travel or are stored: messages, arrays, files, identities, sealed channels."""
