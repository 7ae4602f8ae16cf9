"""Answers messages on a node: adapters for both kinds of app, clients, and their files."""
