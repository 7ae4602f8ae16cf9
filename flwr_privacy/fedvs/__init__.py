"""FedVS: vertical split learning on Lagrange-coded shares, which does not wait for stragglers.

Source: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split
Models" (ICML 2023). Clients hold columns of the same rows, the server the labels. Every client
shares its data once, and its weights in every round; what any ``2 (K + T - 1) + 1`` clients compute
on the shares gives the server the exact mean of all clients' embeddings. The paper protects
against T clients, or one client's answer at the server; `flwr_privacy.strategies.FedVS` adds masks
that leave the server nothing but the sums.
"""
