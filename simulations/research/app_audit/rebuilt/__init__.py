"""The attacks of an audit: what can be rebuilt from what left the nodes of an app."""
