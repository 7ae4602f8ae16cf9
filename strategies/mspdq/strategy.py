"""MSPDQ on the server: MSP with messages of a few bits, seen one by one or summed.

"A Novel Privacy Enhancement Scheme with Dynamic Quantization for Federated Learning", Algorithm 1.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

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
from flwr_privacy.mspdq import CODES, MIX, SYNC, Hub, Intervals, MSPTerms, SumHub, code_sum
from flwr_privacy.mspdq.terms import STARTS
from flwr_privacy.privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.grid import GridMean
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.secure_sum import Bounds, NotOpenedError
from flwr_privacy.strategies.requests.instruction import Instruction, to_each
from flwr_privacy.strategies.requests.messenger import Assigned
from flwr_privacy.strategies.requests.request_log import ClientReply
from flwr_privacy.wire.identity import derive_seed
from flwr_privacy.wire.message import TRAIN, Fields

from .msp import FINISH, MSP, RECOMMENDED
from .replies import numbers_of

__all__ = ["MSPDQ"]

logger = logging.getLogger("flwr.privacy")


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class MSPDQ(MSP):
    """Model splitting with dynamic quantization (MSPDQ-FL, Algorithm 1, equations (20) to (22)).

    As `MSP`, but the clients send codes of a few bits, on intervals around what was decoded of
    their last message, which shrink as the models approach each other.

    The clients' app is wrapped in `flwr_privacy.clients.MSPDQClient`.

    Parameters
    ----------
    fraction_train, ..., kappa, ..., on_dropout, keep_back, trainable, paper
        Those of `MSP`, with other defaults of `paper`: harmonic coupling, 10 steps. Under a
        `secure_sum` the coupling is 0.5 and there is one step, which gives the exact average:
        "fast, no masking" where the server sees the codes, and nothing is lost where it does not.
    mixing_start : {"independent", "reference", "global"}, optional
        Where mixing starts: from each client's own split (default), from one client's (`paper`), or
        from the global model, without any split (under a secure sum).
    bits : int, default 8
        Bits of a code, from 1 to 16; under a secure sum from 2. With the rules ``self`` and
        ``bound`` and several steps, rounding errors of fewer than 3 add up and the model is lost.
    levels : int, optional
        Knobs of an interval, at most and by default ``2**bits``; under a secure sum
        ``2**bits - 1``, so that codes lie evenly about zero.
    interval : {"paper", "fixed", "linf", "bound", "self"}, optional
        Rule of the intervals' widths, see `flwr_privacy.mspdq.Intervals`. By default ``self``, with
        `paper` ``paper``, under a secure sum ``bound``, which needs the global start.
    pi, c, bound : float, default 1.0
        Constants of the rules ``fixed``, ``linf`` and ``bound``. `bound` is the largest entry of a
        client's update, in units of the weights: what is beyond is clipped.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Guarantee
    ---------
    Under a secure sum: the server sees, of each message, the sum of the codes of all clients and
    no single one, as `flwr_privacy.secure_sum.Participant` says; a code takes
    ``bits + ceil(log2 M)`` bits on the wire for M draws. What the averages tell is not covered.
    Without one: none. The server decodes the values, and recovers every model up to the rounding,
    an error of about a percent of the update or less from 4 bits on
    (`flwr_privacy.simulations.research.mspdq.consensus`). Random rounding protects nobody
    (`flwr_privacy.simulations.research.mspdq.theory.quantizer_delta`).

    Notes
    -----
    From a common start, and with widths that nobody has to be asked about, the clients take the
    first step by themselves: K exchanges, not 1 + K.

    Under a secure sum nobody may be lost between two steps: the sum over all but one, beside that
    over all, would give that one away. So the round then ends with the average before (`on_dropout`
    is ``finish``), as if it had been planned with fewer steps. With one step, whoever is lost is
    left out, and nothing else happens.

    Examples
    --------
    >>> from flwr_privacy.secure_sum import SecureSum
    >>> from flwr_privacy.strategies import MSPDQ
    >>> strategy = MSPDQ(bits=4, secure_sum=SecureSum(), bound=0.5)
    """

    mixing_start: Literal["independent", "reference", "global"] | None = None
    bits: int = 8
    levels: int | None = None
    interval: Literal["paper", "fixed", "linf", "bound", "self"] | None = None
    pi: float = 1.0
    c: float = 1.0
    bound: float = 1.0

    scheme: ClassVar[str] = "mspdq"
    quantizes: ClassVar[bool] = True
    summable: ClassVar[bool] = True
    sum_phases: ClassVar[frozenset[str]] = frozenset({TRAIN, MIX})

    def __post_init__(self) -> None:
        secure = self.secure_sum is not None
        check_integer("bits", self.bits, minimum=2 if secure else 1, maximum=16)
        largest = 2**self.bits - secure
        if self.levels is not None:
            check_integer("levels", self.levels, minimum=2 ** (self.bits - 1) + 1, maximum=largest)
        usual = ("global", "bound") if secure else ("reference", "paper")
        if not secure and not self.paper:
            usual = ("independent", "self")
        start, interval = self.mixing_start or usual[0], self.interval or usual[1]
        check_choice("mixing_start", start, STARTS)
        self._quantized: dict[str, Any] = {
            "start": start,
            "levels": self.levels or largest,
            "interval": interval,
        }
        self.intervals = Intervals(rule=interval, pi=self.pi, c=self.c, bound=self.bound)
        constants = {"fixed": "pi", "linf": "c", "bound": "bound"}
        idle = {name: 1.0 for rule, name in constants.items() if rule != interval}
        check_usual(self, idle, f"with interval='{interval}', which does not use it")
        if secure:
            _check_summed(paper=self.paper, start=start, intervals=self.intervals)
        super().__post_init__()
        fewest = 2 + 2 * (1 + 2 * self.terms.kappa)
        if interval in ("self", "bound") and self.terms.rounds > 1 and self.terms.levels < fewest:
            logger.warning(
                "levels = %d: the rounding errors of so few knobs add up from step to step; with "
                "kappa = %g it takes %d",
                *(self.terms.levels, self.terms.kappa, math.ceil(fewest)),
            )
        if secure:
            self._check_drawn()

    def _usual(self, *, paper: bool) -> dict[str, Any]:
        if self.secure_sum is not None:
            return {"gamma": 0.5, "coupling": "const", "rounds": 1, "on_dropout": FINISH}
        if paper:
            return {"gamma": 0.1, "coupling": "harmonic", "rounds": 10}
        return RECOMMENDED

    def _check_drawn(self) -> None:
        """Refuse options that a secure sum cannot have, such as unequal weights."""
        if self._shares is not None:
            raise InvalidParameterError(
                "shares", self._shares, "nothing under a secure sum: nobody may outweigh the others"
            )
        if self.terms.levels % 2 == 0:
            raise InvalidParameterError(
                "levels", self.terms.levels, "an odd number under a secure sum"
            )
        if self._on_dropout != FINISH:
            raise InvalidParameterError(
                "on_dropout",
                self._on_dropout,
                "'finish' under a secure sum: other sums over the same models give clients away",
            )

    def _terms_of(self, server_round: int) -> MSPTerms:
        return replace(super()._terms_of(server_round), **self._quantized)

    # -- A learning round --------------------------------------------------------------------

    def instruct(self, server_round: int) -> Instruction:
        """Return the terms of a learning round, with the first width where it is known.

        If all start from the split of one client, that client is told.
        """
        self._reference: NDArray[Any] | None = None
        told = super().instruct(server_round)
        self._mix_from(self._layout.vector(self._template))
        fields = {**told.fields, **(self._first_width() if self.terms.start == "global" else {})}
        if self.terms.start != "reference":
            return replace(told, fields=fields, again=self._steps_left())
        seed = self.experiment.seed
        self._referred = min(
            self.draws(server_round),
            key=lambda client: derive_seed(seed, "reference", server_round, client),
        )
        return replace(told, fields=fields, own=to_each({self._referred: {"refers": True}}))

    def _instruction(self, phase: str, fields: Fields) -> Instruction:
        """Return the instruction; codes are summed, or taken one by one if the server sees them."""
        if self.secure_sum is None:
            return Instruction(
                fields=fields,
                accumulator=partial(WeightedMean, {}),
                take=partial(self._take_message, phase),
            )
        return Instruction(
            fields={**fields, "sums": True, **_table(self.draws(self._current))},
            accumulator=lambda: code_sum(self._layout.size),
            again=phase == MIX and self._steps_left(),
        )

    def _steps_left(self) -> bool:
        """Tell whether another mixing step follows the next one."""
        return self._messages + 1 < self.terms.rounds

    def _take_message(self, phase: str, mean: WeightedMean, reply: ClientReply) -> None:
        """Take a client's message.

        Raises
        ------
        ReplyRefusedError
            If it is malformed.
        """
        try:
            self._take_visible(phase, reply)
        except (InvalidParameterError, ValueError) as error:
            raise ReplyRefusedError("malformed", f"client {reply.client_id}: {error}") from error
        weight = self.weights(self._current)[reply.client_id]
        mean.accumulate(reply.client_id, {}, weight=weight)

    def bounds_of(self, clients: list[str], server_round: int) -> Bounds:
        """Return the bounds of the codes, and of the number of draws of a client."""
        if self.secure_sum is None:
            raise ProtocolError("there is no secure sum")
        draws = [self.draws(server_round)[client] for client in clients]
        return self.secure_sum.bounds(
            len(clients),
            code_limit=self.terms.levels // 2,
            largest_weight=max(draws),
            total_weight=sum(draws),
        )

    def _mix_from(self, start: NDArray[Any]) -> None:
        """Begin to mix from a vector; the independent start uses only its length."""
        self._messages = 0  # that were averaged
        if self.secure_sum is None:
            self._hub: Hub | SumHub = Hub(
                self.terms,
                self.intervals,
                self.draws(self._current),
                start,
                weights=self.weights(self._current),
                largest=self._layout.largest,
            )
        else:
            self._hub = SumHub(self.terms, self.intervals, start)

    def _take_visible(self, phase: str, reply: ClientReply) -> None:
        """Take a message that the server sees."""
        client, fields, terms, hub = reply.client_id, reply.fields, self.terms, self._hub
        if isinstance(hub, SumHub):
            raise ProtocolError("under a secure sum no message is seen")
        packed = reply.arrays().get(CODES)
        if phase == TRAIN and terms.start == "reference":
            if client == self._referred:
                self._reference = hub.decoded(_there(packed), *numbers_of(fields, "ends", 2))
            elif packed is not None:
                raise ReplyRefusedError("names", "codes of a client whose split was not asked for")
            return
        if phase == TRAIN and terms.start == "independent":
            hub.begin(client, _there(packed), *numbers_of(fields, "ends", 2))
        elif phase == MIX or terms.leaps:
            half = fields.get("half-width") if terms.interval == "self" else None
            saturated = check_integer("saturated", fields.get("saturated"), minimum=0)
            hub.hear(client, _there(packed), half)
            self._saturated += saturated
        if terms.interval in ("paper", "linf"):
            hub.tell(client, check_number("scalar", fields.get("scalar")))

    def _mixed(self, grid: Grid, server_round: int, mean: WeightedMean) -> NDArray[Any] | None:
        if self.terms.start != "reference":
            return super()._mixed(grid, server_round, mean)
        if self._reference is None:
            logger.warning("round %d: the reference client did not answer", server_round)
            return None
        self._members = sorted(mean.clients)
        # All have it as it comes in the message.
        common = self._layout.vector(self._layout.arrays(self._reference))
        self._mix_from(common)
        fields, assigned = self._first_width(), self._assigned()
        synced = self._exchange(grid, server_round, SYNC, common, fields, assigned)
        return None if synced is None else super()._mixed(grid, server_round, synced)

    def _exchange(
        self,
        grid: Grid,
        server_round: int,
        phase: str,
        average: NDArray[Any],
        fields: Fields,
        assigned: Assigned,
    ) -> WeightedMean | None:
        try:
            self.transport.go_on()
        except NotOpenedError as error:
            logger.warning("%s", error)
            self._lost += 1  # at least
            return None
        return super()._exchange(grid, server_round, phase, average, fields, assigned)

    def _average(self, mean: WeightedMean) -> NDArray[Any]:
        self._messages += 1
        if isinstance(self._hub, SumHub) and isinstance(mean, GridMean):
            drawn = self.draws(self._current)
            if mean.weight != sum(drawn[client] for client in mean.clients):
                raise NotOpenedError("the weights in the sum are not how often clients were drawn")
            try:
                self._hub.hear(mean.sums[CODES], int(mean.weight))
            except InvalidParameterError as error:
                raise NotOpenedError(f"the sum is of no codes: {error}") from error
        return self._hub.average(self._members)

    def _sent(self) -> int:
        return int(self.terms.leaps)

    def _plan(self) -> Fields:
        return self._planned(self._members)

    def _first_width(self) -> Fields:
        """Return the width of message 1, if clients send it after a common start."""
        if not self.terms.leaps:
            return {}
        return self._planned([])

    def _planned(self, clients: list[str]) -> Fields:
        self._hub.plan(clients)
        return {} if self._hub.width is None else {"width": self._hub.width}

    # -- What it says of itself --------------------------------------------------------------

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return the results of the mixing and of the codes."""
        metrics = super().round_metrics(card)
        if not self._current:
            return metrics
        metrics["levels"] = self.terms.levels
        metrics["width"] = self._hub.widest
        if self.secure_sum is None:
            metrics["saturated"] = self._saturated
        return metrics

    def guarantee(self) -> Guarantee:
        """Return a guarantee of what the secure sum hides; without one, of nothing."""
        if self.secure_sum is None:
            return replace(
                super().guarantee(),
                not_protected=(
                    "the model of a client: whoever sees its messages recovers it up to the "
                    "rounding, an error of about a percent of the update or less from 4 bits on",
                    *self._kept_back(),
                ),
            )
        return Guarantee(
            scheme=self.scheme,
            protects="the model of a client, up to the averages of the round",
            adversary="an honest-but-curious server and clients that collude with it",
            not_protected=(
                "what the averages say of a client: there is no noise, and the rounding is none",
                "who takes part, drops out or refuses, and timing",
                *self._kept_back(),
            ),
            assumptions=(
                "the server follows the protocol: pinned keys are needed against one that lies "
                "about keys, a larger threshold against one that lies about who takes part",
                "each client keeps its own secrets",
            ),
            evidence=(
                "tests of MSPDQ: its codes, its mixing, what its messages tell",
                "tests of the secure sum: dishonest servers and clients, and clients that drop out",
                "the attack that flwr-privacy attack mspdq runs",
            ),
        )


def _check_summed(*, paper: bool, start: str, intervals: Intervals) -> None:
    """Refuse options under which a secure sum would show something of a single client."""
    if paper:
        raise InvalidParameterError("paper", paper, "false under a secure sum: it starts apart")
    if start != "global":
        raise InvalidParameterError(
            "mixing_start", start, "'global' under a secure sum: others show what one client has"
        )
    if not intervals.public:
        raise InvalidParameterError(
            "interval", intervals.rule, "'bound' or 'fixed' under a secure sum: no client is asked"
        )


def _table(draws: Mapping[str, int]) -> Fields:
    """Return the public table of each client's draws, unless each was drawn once."""
    if max(draws.values(), default=1) == 1:
        return {}
    return {"drawn": sorted(draws), "draws": [draws[client] for client in sorted(draws)]}


def _there(packed: NDArray[Any] | None) -> NDArray[Any]:
    if packed is None:
        raise ReplyRefusedError("names", f"no array '{CODES}'")
    return packed
