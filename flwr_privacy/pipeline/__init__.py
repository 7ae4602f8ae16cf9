"""The node's answer pipeline: mechanisms, the steps of every release, and the node's files."""
