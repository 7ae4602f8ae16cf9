"""What `flwr-privacy verify` finds out about a privacy card; it needs neither Flower nor torch."""
