"""FedVS: vertical split learning on Lagrange-coded shares, which does not wait for stragglers.

Source: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split
Models" (ICML 2023). Clients hold columns of the same rows, the server the labels. Every client
shares its data once, and its weights in every round; what any ``2 (K + T - 1) + 1`` clients compute
on the shares gives the server the exact mean of all clients' embeddings. The paper protects
against T clients, or one client's answer at the server; `flwr_privacy.strategies.FedVS` adds masks
that leave the server nothing but the sums.
"""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from flwr_privacy.coding.lagrange import max_partitions, max_stragglers, recovery_threshold

    from .costs import Costs, cost_model
    from .network import embed, expand, expanded_width, gradient_of, initial_weights, project
    from .privacy import (
        SLACK_BITS,
        check_slack,
        server_view_is_tight,
        slack,
    )
    from .quantisation import (
        Scales,
        check_partial_sum,
        dequantise,
        equal_share,
        max_scale_bits,
        quantise,
        quantise_stochastic,
        round_half_up,
        round_stochastic,
    )
    from .rows import Segments, batch_of, batches, order
    from .server_model import ServerModel
    from .sharing import (
        data_shares,
        decode_rows,
        evaluate,
        pad_rows,
        pad_rows_paper,
        weight_shares,
        weight_shares_paper,
        zero_masks,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "SLACK_BITS",
    "Costs",
    "Scales",
    "Segments",
    "ServerModel",
    "batch_of",
    "batches",
    "check_partial_sum",
    "check_slack",
    "cost_model",
    "data_shares",
    "decode_rows",
    "dequantise",
    "embed",
    "equal_share",
    "evaluate",
    "expand",
    "expanded_width",
    "gradient_of",
    "initial_weights",
    "max_partitions",
    "max_scale_bits",
    "max_stragglers",
    "order",
    "pad_rows",
    "pad_rows_paper",
    "project",
    "quantise",
    "quantise_stochastic",
    "recovery_threshold",
    "round_half_up",
    "round_stochastic",
    "server_view_is_tight",
    "slack",
    "weight_shares",
    "weight_shares_paper",
    "zero_masks",
]
