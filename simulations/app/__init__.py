"""The Flower app of this package: its ServerApp and its ClientApp."""
