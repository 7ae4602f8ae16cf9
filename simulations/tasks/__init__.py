"""What simulations train: models, data sets, and how the data are divided among clients."""
