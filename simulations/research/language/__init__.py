"""A small language model, text that it learns, and what it remembers of its clients' sentences."""
