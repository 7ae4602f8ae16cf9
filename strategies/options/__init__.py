"""Constructor options of every strategy: FedAvg's arguments and the options of the loop."""
