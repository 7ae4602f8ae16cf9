"""The app that a deployment trains in turns, with each scheme and without any."""
