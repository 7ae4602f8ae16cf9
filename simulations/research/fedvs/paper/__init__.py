"""What the paper of FedVS states: theorems, costs, delays and sharing, as printed or counted."""
