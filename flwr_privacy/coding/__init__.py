"""Coding that several schemes share: prime fields, secret sharing, quantisation, packing."""
