"""Deployments on this machine: a SuperLink, SuperNodes, their keys and certificates."""
