"""What becomes of a training when something fails, and long trainings with faults."""
