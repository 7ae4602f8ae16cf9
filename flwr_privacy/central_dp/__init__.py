"""Central differential privacy of whole clients (DP-FedAvg): mechanism, mean and guarantee."""
