"""A NumPyClient with BatchNorm on tabular records."""
