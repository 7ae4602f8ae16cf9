"""What the paper of FedVS states: theorems, delays and sharing, as printed."""
