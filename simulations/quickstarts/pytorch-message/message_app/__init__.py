"""A Flower app of the Message API: PyTorch on handwritten digits."""
