"""What the server learns from an app: `flwr-privacy audit`."""
