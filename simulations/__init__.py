"""Runs the schemes: the app, engines, tasks, reports, deployments, and the research on them."""
