"""A paper's figures as experiments: what is trained, what is claimed, and whether it holds."""
