"""What every strategy is told: FedAvg's arguments, and the options of the loop."""
