"""Changes the files of an app: its client half, its server half, its training."""
