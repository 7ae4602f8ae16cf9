"""A Flower app with a NumPyClient: PyTorch on handwritten digits."""
