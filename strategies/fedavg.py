"""Federated averaging on the shared loop: the baseline without noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.keywords import checked_keywords
from flwr_privacy.privacy.grid import GridMean
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.secure_sum import Bounds, SecureSum
from flwr_privacy.secure_sum.fedavg_terms import FedAvgSumTerms
from flwr_privacy.strategies.loop.base import SchemeStrategy
from flwr_privacy.strategies.requests.instruction import Instruction

__all__ = ["FedAvg"]


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class FedAvg(SchemeStrategy):
    """Federated averaging (McMahan et al. 2017, algorithm 1); replaces Flower's FedAvg in place.

    The clients' app is wrapped in `flwr_privacy.clients.FedAvgClient`; under a secure sum in
    `flwr_privacy.clients.SecureSumClient`.

    Parameters
    ----------
    fraction_train, ..., loop, inner, secure_sum
        FedAvg's and those of `SchemeStrategy`, `secure_sum` among them.
    keep_back : sequence of str, default ()
        Arrays that are not sent under a secure sum, beside those of integers, which never are: the
        model keeps the server's values of them.
    trainable : sequence of str, optional
        Names of the arrays that are trained, or patterns (``"*.lora_*"``): adapters, a head. The
        others are frozen: they never travel, and every client must have the same, which it checks.
        By default all arrays are trained. What ``requires_grad`` says is
        `flwr_privacy.clients.torch.trainable_names`; the clients call
        `flwr_privacy.clients.torch.load_trainable`.

    Guarantee
    ---------
    Without a secure sum none: the server sees the arrays and the metrics of every client. With one
    it sees the sum of the updates and of the weights, and no metrics; see
    `flwr_privacy.secure_sum.Participant`. What the sum says of a client is not bounded.

    Examples
    --------
    >>> from flwr_privacy.secure_sum import SecureSum
    >>> from flwr_privacy.strategies import FedAvg, LoopOptions
    >>> strategy = FedAvg(fraction_train=0.5, loop=LoopOptions(seed=1))
    >>> strategy = FedAvg(fraction_train=0.5, secure_sum=SecureSum(value_range=2.0))
    """

    keep_back: Sequence[str] = ()
    trainable: Sequence[str] | None = None

    scheme: ClassVar[str] = "fedavg"
    summable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._keep_back = tuple(self.keep_back)
        self._keep_back_given = self._keep_back
        self.use_trainable(self.trainable)
        if self.keep_back and self.secure_sum is None:
            allowed = "() without a secure sum: the clients send whatever your app returns"
            raise InvalidParameterError("keep_back", self.keep_back, allowed)

    def instruct(self, server_round: int) -> Instruction:
        """Return the terms; under a secure sum, clients send their updates as codes."""
        if self.secure_sum is None:
            return super().instruct(server_round)
        terms = self._terms(self.secure_sum)
        names = terms.names(self._template)
        return Instruction(
            accumulator=partial(GridMean, self._template, terms.grid, names), fields=terms.write()
        )

    def bounds_of(self, clients: list[str], server_round: int) -> Bounds:
        """Return the bounds that follow from the parameters of the secure sum."""
        return (self.secure_sum or SecureSum()).bounds(len(clients))

    def guarantee(self) -> Guarantee:
        """Return a guarantee of nothing, or of what the secure sum hides."""
        if self.secure_sum is None:
            return Guarantee(scheme=self.scheme, protects="nothing", adversary="nobody")
        kept = set(self._template)
        if self._template:
            kept -= set(self._terms(self.secure_sum).names(self._template))
        not_protected = [
            "what the sum says of a client: there is no noise",
            "who takes part, drops out or refuses, and timing",
        ]
        if kept:
            not_protected.append(f"(not sent at all: {', '.join(sorted(kept))})")
        return Guarantee(
            scheme=self.scheme,
            protects="the update and the weight of a client, up to their sum over the round",
            adversary="an honest-but-curious server and clients that collude with it",
            not_protected=tuple(not_protected),
            assumptions=(
                "the server follows the protocol: pinned keys are needed against one that lies "
                "about keys, a larger threshold against one that lies about who takes part",
                "each client keeps its own secrets",
            ),
            evidence=(
                "tests of the secure sum: dishonest servers and clients, and clients that drop out",
            ),
        )

    def _terms(self, secure_sum: SecureSum) -> FedAvgSumTerms:
        return FedAvgSumTerms(
            grid=secure_sum.grid,
            value_range=float(secure_sum.value_range),
            weighted_by=self.weighted_by_key if secure_sum.largest_weight > 1 else "",
            keep_back=self._keep_back,
        )
