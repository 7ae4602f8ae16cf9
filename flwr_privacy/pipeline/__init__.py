"""The way out of a node: what a release is, the steps that each takes, and what the node stores."""
