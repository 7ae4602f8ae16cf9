"""MSP on the server: each learning round has several exchanges with the same clients.

"A Novel Privacy Enhancement Scheme with Dynamic Quantization for Federated Learning". The clients
train and split their models; then come K mixing steps, in each of which the server averages what it
hears and sends the average back.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.errors import (
    InvalidParameterError,
    ProtocolError,
    check_choice,
    check_integer,
    check_number,
)
from flwr_privacy.keywords import check_usual, checked_keywords
from flwr_privacy.mspdq import MIX, MSPTerms, TheorySteps
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.privacy.updates import kept_back, released_names
from flwr_privacy.secure_sum import NotOpenedError
from flwr_privacy.strategies.loop.draws import DrawnStrategy
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.messenger import Assigned, only
from flwr_privacy.strategies.state.experiment import to_record
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.layout import Layout
from flwr_privacy.wire.message import TRAIN, Fields

__all__ = ["FINISH", "MSP", "RECOMMENDED", "RESTART"]

logger = logging.getLogger("flwr.privacy")

RESTART, CONTINUE, FINISH = "restart", "continue", "finish"

RECOMMENDED: dict[str, Any] = {"gamma": 0.3, "coupling": "const", "rounds": 10}
"""What a mixing has where nothing else is said."""


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class MSP(DrawnStrategy):
    """Model splitting with full-precision mixing (MSP-FL, equations (2) to (6)).

    A client uploads a randomly disturbed copy of its model, keeps a hidden rest that makes up for
    it, and mixes for K steps with the server's averages, in which the disturbance cancels: K + 1
    exchanges per learning round.

    The clients' app is wrapped in `flwr_privacy.clients.MSPClient`.

    Parameters
    ----------
    fraction_train, ..., loop, inner, secure_sum
        FedAvg's and those of `flwr_privacy.strategies.loop.draws.DrawnStrategy`: `replacement` and
        `shares` among them.
    kappa : float, default 0.5
        Consensus gain, between 0 and 1.
    gamma : float, optional
        Coupling of the visible with each hidden sub-state; by default 0.3, with `paper` 0.1.
    coupling : {"const", "harmonic", "sqrt", "random"}, optional
        How the coupling goes on; by default constant.
    mixing_rounds : int, TheorySteps or callable, optional
        Mixing steps K; or those of the theory, which grow with the learning round; or a function of
        the learning round from 1 that returns them. By default 10, with `paper` 4.
    tolerance : float, optional
        Instead of `mixing_rounds`: as many steps as leave at most this share of the split.
    m : int, default 1
        Hidden sub-states.
    mass : {"paper", "normalized"}, default "paper"
        What they weigh, see `flwr_privacy.mspdq.Mixing`.
    m_mode : {"common", "iid"}, default "common"
        Whether all clients have m hidden sub-states, or each draws its own number from 1 to m in
        every learning round, in secret: the average is then right in the mean over the draws.
    split : {"uniform", "uniform_m", "laplace", "gaussian"}, default "uniform"
        Law of the first visible sub-state, see `flwr_privacy.mspdq.MSPTerms`.
    eps_s : float, default 0.3
        Splitting factor of the uniform laws, in [0, 1).
    scale : float, default 1.0
        Scale of the Laplace law, or standard deviation of the Gaussian one, in units of the
        weights.
    on_dropout : {"restart", "continue", "finish"}, default "restart"
        What becomes of a learning round in which a client is lost between two exchanges: it is
        given up, and the model stays as it was; or it goes on with the others, towards a biased
        average; or it ends with the average before. Whoever is missing in the first exchange takes
        no part.
    keep_back : sequence of str, optional
        Arrays that are not sent, beside those of integers and what torch calls running statistics
        of normalisation layers, which never are: the model keeps the server's values of them.
        Where it is left out and arrays that came as a list look like statistics, the first round is
        refused: see `flwr_privacy.clients.torch.statistics_of`; [] says that there are none.
    trainable : sequence of str, optional
        Names of the arrays that are trained, or patterns (``"*.lora_*"``): adapters, a head. The
        others are frozen: they never travel, and every client must have the same, which it checks.
        By default all arrays are trained. What ``requires_grad`` says is
        `flwr_privacy.clients.torch.trainable_names`; the clients call
        `flwr_privacy.clients.torch.load_trainable`.
    paper : bool, default False
        The algorithm as printed: its defaults, sampling with replacement, and only couplings that
        its theorems allow.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Guarantee
    ---------
    None. The server, and whoever sees a client's messages, solves for the trained model from the
    first two of a round (`flwr_privacy.simulations.research.mspdq.consensus`), whatever the split;
    it then has what the client of plain FedAvg would have sent. With unknown m or couplings it
    needs a few more. `flwr-privacy attack mspdq` shows it. The paper's Theorem 1 does not describe
    the protocol.

    Examples
    --------
    >>> from flwr_privacy.strategies import MSP
    >>> strategy = MSP(fraction_train=0.5, tolerance=1e-3)
    """

    kappa: float = 0.5
    gamma: float | None = None
    coupling: Literal["const", "harmonic", "sqrt", "random"] | None = None
    mixing_rounds: int | TheorySteps | Callable[[int], int] | None = None
    tolerance: float | None = None
    m: int = 1
    mass: Literal["paper", "normalized"] = "paper"
    m_mode: Literal["common", "iid"] = "common"
    split: Literal["uniform", "uniform_m", "laplace", "gaussian"] = "uniform"
    eps_s: float = 0.3
    scale: float = 1.0
    on_dropout: Literal["restart", "continue", "finish"] | None = None
    keep_back: Sequence[str] | None = None
    trainable: Sequence[str] | None = None
    paper: bool = False

    scheme: ClassVar[str] = "msp"
    quantizes: ClassVar[bool] = False
    keeps_statistics: ClassVar[bool] = True
    not_called: ClassVar[frozenset[str]] = frozenset({"aggregate_train"})

    def __post_init__(self) -> None:
        if self.replacement is None:
            self.replacement = self.paper
        super().__post_init__()
        self._keep_back_given = self.keep_back
        self.use_trainable(self.trainable)
        usual = self._usual(paper=self.paper)
        law = {"scale": 1.0} if self.split in ("uniform", "uniform_m") else {"eps_s": 0.3}
        check_usual(self, law, f"with split='{self.split}', which does not use it")
        if self.tolerance is not None and self.mixing_rounds is not None:
            raise InvalidParameterError(
                "tolerance", self.tolerance, "nothing beside mixing_rounds: it decides on them"
            )
        dropout = self.on_dropout or usual.get("on_dropout", RESTART)
        self._on_dropout = check_choice("on_dropout", dropout, (RESTART, CONTINUE, FINISH))
        self._mixing_rounds = usual["rounds"] if self.mixing_rounds is None else self.mixing_rounds
        # What does not change from round to round.
        self._terms = MSPTerms(
            kappa=self.kappa,
            gamma=usual["gamma"] if self.gamma is None else self.gamma,
            coupling=usual["coupling"] if self.coupling is None else self.coupling,
            m=self.m,
            mass=self.mass,
            m_mode=self.m_mode,
            paper=self.paper,
            split=self.split,
            eps_s=self.eps_s,
            scale=self.scale,
            keep_back=list(self.keep_back or ()),
        )
        if self.tolerance is not None:
            if not 0 <= check_number("tolerance", self.tolerance) < 1:
                raise InvalidParameterError(
                    "tolerance", self.tolerance, "a number from 0 and below 1"
                )
            self._mixing_rounds = self._terms.mixing.rounds_needed(self.tolerance)
        self.terms = self._terms_of(1)

    def _usual(self, *, paper: bool) -> dict[str, Any]:
        return {"gamma": 0.1, "coupling": "const", "rounds": 4} if paper else RECOMMENDED

    def setup(self, grid: Grid) -> None:
        """Check the options before the first round.

        Raises
        ------
        InvalidParameterError
            If a round has steps that are not allowed, or a client has no share.
        """
        super().setup(grid)
        for server_round in range(1, 1 + (self.planned_rounds or 0)):
            self._terms_of(server_round)

    # -- A learning round --------------------------------------------------------------------

    def train_round(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Train, split and mix: 1 + K exchanges with the same clients (K from a common start)."""
        self._lost, self._saturated, self._mixed_rounds, self._given_up = 0, 0, 0, False
        self._current = 0
        if not self.prepared(grid, server_round):
            return None, None
        messages = self.configure_train(server_round, arrays, config, grid)
        replies = self.messenger.exchange(grid, messages, phase=TRAIN)
        mean, metrics = self.collect(TRAIN, replies)
        if mean is None or metrics is None:
            return None, None
        average = self._mixed(grid, server_round, mean)
        if average is None:
            self._given_up = True
            return None, None
        weight = math.fsum(self.weights(server_round)[client] for client in self._members)
        released = self._layout.arrays(average)
        return self.renewed(server_round, released, metrics, weight), metrics

    def instruct(self, server_round: int) -> Instruction:
        """Return the terms of a learning round; visible sub-states are averaged.

        A client's counts as often as it was drawn, or by its share.
        """
        if not self.messenger.recorded:
            raise ProtocolError(
                f"{self.scheme}: a learning round takes several exchanges, so this works only "
                "where this strategy's own start runs the rounds"
            )
        self._current = server_round
        self.terms = self._terms_of(server_round)
        names = released_names(self._template, self.terms.keep_back)
        self._layout = Layout.of(self._template, names)
        if self._layout.size == 0:
            raise InvalidParameterError("arrays", names, "a model with weights")
        return self._instruction(TRAIN, write(self.terms))

    def _instruction(self, phase: str, fields: Fields) -> Instruction:
        """Return the instruction of one exchange of a round."""
        weights = self.weights(self._current)
        return Instruction(
            fields=fields,
            accumulator=lambda: WeightedMean({n: self._template[n] for n in self._layout.parts}),
            take=lambda mean, reply: mean.accumulate(
                reply.client_id, reply.arrays(), weight=weights[reply.client_id]
            ),
        )

    def _terms_of(self, server_round: int) -> MSPTerms:
        rounds = self._mixing_rounds
        if isinstance(rounds, TheorySteps):
            rounds = rounds.rounds(server_round, self._terms.mixing, quantized=self.quantizes)
        rounds = rounds(server_round) if callable(rounds) else rounds
        check_integer("mixing_rounds", rounds, minimum=0)
        return replace(self._terms, rounds=rounds)

    def _mixed(self, grid: Grid, server_round: int, mean: WeightedMean) -> NDArray[Any] | None:
        """Carry out the mixing steps; return the last average, or None if the round is given up."""
        self._members = sorted(mean.clients)
        average = self._averaged(mean)
        if average is None:
            return None
        self._mixed_rounds = self._sent()
        while self._mixed_rounds < self.terms.rounds:
            fields, assigned = {"step": self._mixed_rounds, **self._plan()}, self._assigned()
            heard = self._exchange(grid, server_round, MIX, average, fields, assigned)
            latest = None if heard is None else self._averaged(heard)
            if latest is None:
                return average if self._on_dropout == FINISH else None
            average = latest
            self._mixed_rounds += 1
        return average

    def _averaged(self, mean: WeightedMean) -> NDArray[Any] | None:
        try:
            return self._average(mean)
        except NotOpenedError as error:
            logger.warning("%s", error)
            return None

    def _exchange(
        self,
        grid: Grid,
        server_round: int,
        phase: str,
        average: NDArray[Any],
        fields: Fields,
        assigned: Assigned,
    ) -> WeightedMean | None:
        """Send an average and collect the next messages; return None if the round is given up."""
        arrays = to_record(self._layout.arrays(average))
        content = RecordDict({self.arrayrecord_key: arrays})
        instruction = self._instruction(phase, fields)
        mean, _ = self.ask(grid, server_round, phase, content, assigned, instruction)
        lost = len(self._members) - self.messenger.request_log(phase).accumulated
        if lost or mean is None:
            self._lost += lost
            logger.warning(
                "round %d: %d of %d clients were lost in mixing (on_dropout = '%s')",
                *(server_round, lost, len(self._members), self._on_dropout),
            )
            if mean is None or self._on_dropout != CONTINUE:
                return None
            self._members = sorted(mean.clients)
        return mean

    def _average(self, mean: WeightedMean) -> NDArray[Any]:
        """Return the average of the latest messages.

        Raises
        ------
        NotOpenedError
            If what was summed cannot be what the clients were to send.
        """
        return self._layout.vector(mean.finish())

    def _sent(self) -> int:
        """Return the number of mixing steps that the clients took with the first exchange."""
        return 0

    def _plan(self) -> Fields:
        """Return the fields that the clients need for their next message."""
        return {}

    def _assigned(self) -> Assigned:
        return only(self.messenger.request_log(TRAIN).asked, self._members)

    # -- What it says of itself --------------------------------------------------------------

    _lost = _saturated = _mixed_rounds = 0
    _given_up = False

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return the results of the mixing; empty before the first one."""
        if not self._current:
            return {}
        done = replace(self.terms.mixing, rounds=self._mixed_rounds)
        return {
            **super().round_metrics(card),
            "mixing_rounds": self._mixed_rounds,
            **({"residual": done.residual} if done.known else {}),
            "lost": self._lost,
            "given_up": int(self._given_up),
        }

    def guarantee(self) -> Guarantee:
        """Return a guarantee of nothing, and why."""
        return Guarantee(
            scheme=self.scheme,
            protects="nothing",
            adversary="nobody",
            not_protected=(
                "the model of a client: whoever sees its messages solves for it from the first two",
                *self._kept_back(),
            ),
            evidence=(
                "tests of MSP: its splitting, its mixing, what its messages tell",
                "the attack that flwr-privacy attack mspdq runs",
            ),
        )

    def _kept_back(self) -> list[str]:
        kept = kept_back(self._template, self._terms.keep_back)
        return [f"(not sent at all: {', '.join(kept)})"] if kept else []
