"""What runs, tries out and shows the schemes: the app, engines, tasks, reports, research."""
