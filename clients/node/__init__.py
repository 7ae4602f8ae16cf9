"""How a node answers: adapters for both kinds of app, its clients, and their files."""
