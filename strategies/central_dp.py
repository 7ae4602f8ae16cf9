"""Central differential privacy on the server: DP-FedAvg with noise in shares, or by the server.

The noise follows from a budget for the whole training. The server records how often
each client was asked, in the releases of the privacy card. So the record survives a resume and
counts every client that was asked, whether its answer came or not.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.serverapp import Grid

from flwr_privacy.central_dp.guarantee import guarantee_of
from flwr_privacy.central_dp.mean import CentralMean
from flwr_privacy.central_dp.mechanism import (
    DISTRIBUTED,
    POISSON,
    SERVER,
    SHARE_REACH,
    CentralDPPlan,
    CentralDPTerms,
    sensitivity,
)
from flwr_privacy.errors import (
    CheckpointError,
    InvalidParameterError,
    ProtocolError,
    check_integer,
    check_number,
)
from flwr_privacy.keywords import checked_keywords
from flwr_privacy.privacy.adaptive_clipping import LARGEST_SHARE, next_clipping_norm
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import released_names
from flwr_privacy.secure_sum import Bounds, NotOpenedError, SecureSum
from flwr_privacy.strategies.loop.base import SchemeStrategy
from flwr_privacy.strategies.loop.draws import each_by_itself, names_of
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.messenger import Assigned
from flwr_privacy.strategies.requests.request_log import RequestLog
from flwr_privacy.wire.message import TRAIN

__all__ = ["CentralDP"]

_GRID_BITS = 18
"""Steps of the grid up to the clipping norm, as a power of two, if noise leaves the room."""

_WIDEST = math.nextafter(2.0, 0.0)
"""Norm that has most steps on a grid which is chosen for it."""


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class CentralDP(SchemeStrategy):
    """Federated averaging of clipped updates with noise on the sum (DP-FedAvg).

    Parameters
    ----------
    fraction_train, ..., loop, inner, secure_sum
        FedAvg's and those of `SchemeStrategy`.
    epsilon, delta : float, default 8.0 and 1e-5
        Budget of a client over the whole training.
    clipping_norm : float, default 1.0
        L2 bound of an update; of the first round, where clipping is adaptive.
    noise : {"distributed", "server"}, default "distributed"
        Who adds the noise: the clients, each a share under a secure sum, so that nobody is trusted;
        or a server that the operators of the nodes trust: deployed nodes send it answers without
        noise only if they list ``central-dp`` in ``allow_unprotected``.
    sampling : {"fixed", "poisson"}, default "fixed"
        Whether a cohort has a fixed number of clients, or as many as are drawn when each is drawn
        by itself, with that number in expectation. Only a trusted server can draw in secret, and
        only that makes the noise less.
    rounds : int, optional
        Rounds over which the budget is spread; by default those of `start`. Needed where a
        `start` of your own runs the rounds.
    quantile : float, optional
        Fraction of the updates that the clipping norm aims to leave as they are, which makes
        clipping adaptive; by default the norm is fixed.
    clipping_learning_rate : float, default 0.2
        Step of adaptive clipping.
    count_share : float, default 0.1
        Share of a round's budget that goes to the count of updates within the norm, where clipping
        is adaptive; up to 0.99.
    grid_bits : int, optional
        The grid has at least ``2**grid_bits`` steps up to the clipping norm; by default 18, or as
        many as leave room in 31 bits for twelve standard deviations of a share.
    keep_back : sequence of str, optional
        Arrays of which nothing is released, beside integers and what torch calls running statistics
        of normalisation layers, which never are. The model keeps the server's values of them.
        Where it is left out and arrays that came as a list look like statistics, the first round is
        refused: see `flwr_privacy.clients.torch.statistics_of`; [] says that there are none.
    insecure_seed : int, optional
        Seed of the server's noise and samples, for tests: nothing is protected then.
    secure_sum : SecureSum, optional
        With noise in shares always there, by default with the usual parameters.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or two do not go together.

    Notes
    -----
    Every client weighs the same. Clients send no losses and no metrics of the training, and are not
    asked to evaluate: `fraction_evaluate` has no effect. A client whose releases are used up is not
    asked any more; the training ends when nobody is left to ask.

    With noise in shares an answer does not say whether its training failed: that is counted with
    noise (`flwr_privacy.privacy.failures`). The history has ``trained`` and ``trained_sigma`` for
    each round, and `start` raises `TooFewTrainedError` where it is certain that fewer than
    `LoopOptions.quorum` train (by default half of the answers).

    With a trusted server that draws in secret noise is released in every round, also if nobody was
    drawn or nobody answered: a round that is skipped then would say who was not there. The result
    is divided by the expected number of clients.

    With noise in shares a client answers a question once. A round that broke off after clients had
    answered is skipped on a resume, unless enough others are drawn: their answers were charged, and
    a second sum over the same round could give them away. A trusted server does such a round again,
    with other noise, as nobody has seen the model that was lost: a round has its checkpoint, with
    its charges, before `evaluate_fn` and `on_round`, and a resumed run shows the same model again.
    What an `aggregate_train` of your own hands out has left before that checkpoint. A `start` of
    your own has none at all: each time that it has a round aggregated is a release, on the card of
    the strategy that did it, and a strategy that is made anew knows nothing of those before.

    Guarantee
    ---------
    See `flwr_privacy.central_dp.mechanism.CentralDPPlan` for adversary, neighbours and what is
    covered in each of the four modes; `guarantee` has it as text.

    Examples
    --------
    >>> from flwr_privacy.strategies import CentralDP
    >>> strategy = CentralDP(fraction_train=0.2, epsilon=8.0, delta=1e-5, clipping_norm=0.5)
    >>> trusted = CentralDP(fraction_train=0.2, noise="server", sampling="poisson", quantile=0.5)
    """

    epsilon: float = 8.0
    delta: float = 1e-5
    clipping_norm: float = 1.0
    noise: Literal["distributed", "server"] = "distributed"
    sampling: Literal["fixed", "poisson"] = "fixed"
    rounds: int | None = None
    quantile: float | None = None
    clipping_learning_rate: float = 0.2
    count_share: float = 0.1
    grid_bits: int | None = None
    keep_back: Sequence[str] | None = None
    insecure_seed: int | None = None

    scheme: ClassVar[str] = "central-dp"
    summable: ClassVar[bool] = True
    keeps_statistics: ClassVar[bool] = True
    weight_key = "num-examples"  # the clients' own: 1

    def __post_init__(self) -> None:
        if self.rounds is not None:
            check_integer("rounds", self.rounds, minimum=1)
        if self.grid_bits is not None:
            check_integer("grid_bits", self.grid_bits, minimum=1, maximum=30)
        if self.quantile is not None:
            next_clipping_norm(
                1.0, 0.5, quantile=self.quantile, learning_rate=self.clipping_learning_rate
            )
            check_number("count_share", self.count_share, minimum=1e-6, maximum=LARGEST_SHARE)
        self._mode = {"noise": self.noise, "sampling": self.sampling}
        self._amplified = self._mode == {"noise": SERVER, "sampling": POISSON}
        sensitivity(self.clipping_norm, **self._mode)  # or says what is not allowed
        self._budget: dict[str, Any] = {
            **self._mode,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "count_share": 0.0 if self.quantile is None else self.count_share,
        }
        CentralDPPlan(**self._budget, rounds=1, q=1.0)  # or says what is not allowed
        self._clipping: dict[str, Any] = {
            "clipping_norm": self.clipping_norm,
            "quantile": self.quantile,
            "clipping_learning_rate": self.clipping_learning_rate,
            "grid_bits": self.grid_bits,
            "keep_back": list(self.keep_back or ()),
        }
        self._rounds = self.rounds
        self._insecure_seed = self._checked_seed(self.insecure_seed)
        self.secure_sum = self._checked_sum(self.secure_sum)
        super().__post_init__()
        self._keep_back_given = self.keep_back
        self.fraction_evaluate = 0.0  # what clients say of their data is a release of its own

    def _build(self) -> None:
        super()._build()
        self.schedule: CentralDPPlan | None = None
        self.terms: CentralDPTerms | None = None
        self.clipping_norm: float = self._clipping["clipping_norm"]
        self._population = self._cohort = 0
        self._known: set[str] = set()  # who was ever there, where everybody is charged
        seed = self._insecure_seed
        self._secret = os.urandom(32) if seed is None else f"insecure {seed}".encode()
        self._insecure = seed is not None
        self._of_round: dict[str, float] = {}
        self._releases = False  # whether noise is released whoever answers

    # -- A round -----------------------------------------------------------------------------

    def instruct(self, server_round: int) -> Instruction:
        """Return the round config; the server's noise is added before the mean is computed."""
        self._cohort = self.transport.cohort
        terms = self.terms = self._plan(self._cohort, self.clipping_norm)
        names = terms.names(self._template)
        terms.check_grid(sum(np.size(self._template[name]) for name in names))
        self._of_round = {}
        charge = terms.charge()
        return Instruction(
            fields=terms.write(),
            accumulator=partial(CentralMean, self._template, terms),
            cost=lambda client: charge,
            charged=self._charged,
            hidden=self._amplified,
            released=partial(self._noised, server_round, terms),
            failed_sigma=terms.failed_sigma if terms.failed_code else None,
        )

    def bounds_of(self, clients: list[str], server_round: int) -> Bounds:
        """Return the bounds of the codes, noise included; every client weighs 1."""
        if self.secure_sum is None:
            raise ProtocolError("there is no secure sum")
        cohort = len(clients)
        if self._mode["sampling"] == POISSON:
            schedule = self._scheduled()
            # What does not fit the usual cohort ends the run; the others are skipped.
            self._bounds(self.secure_sum, max(2, round(schedule.q * self._population)))
            try:
                return self._bounds(self.secure_sum, cohort)
            except InvalidParameterError as error:
                raise NotOpenedError(f"a cohort of {cohort} clients was drawn: {error}") from error
        return self._bounds(self.secure_sum, cohort)

    def _noised(
        self, server_round: int, terms: CentralDPTerms, mean: WeightedMean | None
    ) -> CentralMean | None:
        """Add the server's noise to the sum, if it adds any; choose the next clipping norm."""
        if mean is None and self._releases:
            mean = CentralMean(self._template, terms)
        if not isinstance(mean, CentralMean):
            return None
        number = self._expected() if self._amplified else float(len(mean.clients))
        if terms.noise == SERVER:
            mean.add_noise(self._random(server_round))
        below = mean.settle(number)
        shares = len(mean.clients) if terms.noise == DISTRIBUTED else 1
        self._of_round = {"sigma": terms.share_sigmas()[0] * math.sqrt(shares)}
        if below is not None:
            self._of_round["fraction_below"] = below
            self.clipping_norm = next_clipping_norm(
                self.clipping_norm,
                below,
                quantile=self._clipping["quantile"],
                learning_rate=self._clipping["clipping_learning_rate"],
            )
        return mean

    def _charged(self, request_log: RequestLog) -> set[str]:
        """Return the charged clients: those asked, or all clients where samples are secret."""
        if not self._amplified:
            return set(request_log.released())
        self._releases = self._goes_on()  # before this round is charged
        if not self._releases:
            return set()
        if self.federation.met:
            self._known.update(self.federation.clients())
        return set(self._known)

    def stop(self) -> str:
        """Return why the training ends: the budget is used up."""
        if self.schedule is None:
            return ""
        meant = f"the {self.schedule.releases} releases that the budget is for"
        if self._amplified:
            return "" if self._goes_on() else f"{meant} are made"
        spent = self._spent()
        # Whoever was ever asked may come back.
        asked = {client for release in self.releases for client in release.clients}
        left = len((asked | set(self.federation.clients())) - spent)
        needed = 1 if self.secure_sum is None else self.secure_sum.threshold or 2
        if not spent or left >= needed:
            return ""
        return f"{len(spent)} clients have made {meant}, and {left} are left of {needed} needed"

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return the epsilon spent, and the round's clipping norm, noise and unclipped fraction."""
        spent = card.guarantee.spent or 0.0
        numbers = {
            "epsilon": spent,
            "epsilon_left": max(0.0, self._budget["epsilon"] - spent),
            **self._of_round,
        }
        if self.terms is not None:
            numbers["clipping_norm"] = self.terms.clipping_norm
        return numbers

    # -- The guarantee, and the state of a resume --------------------------------------------

    def guarantee(self) -> Guarantee:
        """Return the guarantee; before the first round it states the requested budget."""
        kept_back = set(self._template)
        if kept_back:
            kept_back -= set(released_names(self._template, self._clipping["keep_back"]))
        quorum, secure_sum = None, self.secure_sum
        if secure_sum is not None and self.terms is not None and self.terms.noise == DISTRIBUTED:
            least = secure_sum.threshold_of(self._cohort)
            quorum = self._cohort, least, secure_sum.colluders_of(self._cohort)
        return guarantee_of(
            **self._mode,
            epsilon=self._budget["epsilon"],
            delta=self._budget["delta"],
            summed=secure_sum is not None,
            quorum=quorum,
            kept_back=kept_back,
            insecure=self._insecure,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule, the clipping norm, and the secret seed of the samples."""
        return {
            "schedule": None if self.schedule is None else asdict(self.schedule),
            "clipping": dict(self._clipping),
            "clipping_norm": self.clipping_norm,
            "population": self._population,
            "secret": self._secret if self._amplified else b"",
            "insecure": self._insecure,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the schedule, the clipping norm, and the secret seed of the samples.

        Raises
        ------
        CheckpointError
            If they were made for another budget, another number of rounds or other clipping.
        """
        rounds = self._rounds or self.planned_rounds
        mine = {**self._budget, "rounds": rounds, **self._clipping}
        theirs = {**(state["schedule"] or {}), **state["clipping"]}
        for key, value in mine.items():
            if theirs.get(key, value) != value:
                raise CheckpointError(
                    f"the checkpoint was calibrated for {key} = {theirs[key]!r}, not {value!r}: "
                    "the noise of the rounds that are done cannot be changed"
                )
        self._insecure |= state["insecure"]
        self.clipping_norm = state["clipping_norm"]
        self._secret = state["secret"] or self._secret
        if state["schedule"] is not None:
            self.schedule = CentralDPPlan(**state["schedule"])
            self._population = state["population"]
        if self._amplified:
            self._known = {client for release in self.releases for client in release.clients}

    # -- Parts -------------------------------------------------------------------------------

    def drawn(self, grid: Grid, server_round: int) -> Assigned:
        """Draw the clients of a round's training, except those whose budget is used up."""
        if self.fraction_train == 0 or (self._amplified and not self._goes_on()):
            return {}
        alone = self._mode["sampling"] == POISSON
        assigned = self.messenger.sample(
            grid,
            server_round,
            TRAIN,
            fraction=1.0 if alone else self.fraction_train,
            minimum=0 if alone else self.min_train_nodes,
            without=self._spent(),
        )
        if not alone:
            return assigned
        self._known.update(names_of(assigned))
        # Under a secure sum the clients of a cohort know each other, and nothing is kept secret.
        secret = self._secret if self._amplified else str(self.experiment.seed).encode()
        return each_by_itself(
            assigned, q=self._scheduled().q, secret=secret, server_round=server_round
        )

    def _spent(self) -> set[str]:
        """Return the clients that were charged as often as their budget allows."""
        if self.schedule is None or self._amplified:
            return set()
        counts = Counter(client for release in self.releases for client in release.clients)
        spent = {c for c, count in counts.items() if not self.schedule.affordable(count)}
        # A node that has said who it is goes by its address all the same under a user's own start.
        return spent | {node for node, client in self.charge_log.names.items() if client in spent}

    def _goes_on(self) -> bool:
        """Tell whether all clients can be charged once more, where all are charged every round."""
        return self.schedule is None or self.schedule.affordable(len(self.releases))

    def _expected(self) -> float:
        """Return the expected number of clients of a secret sample."""
        return self._scheduled().q * self._population

    def _random(self, server_round: int) -> SecureRandom:
        if self._insecure_seed is None:
            return SecureRandom()
        return SecureRandom.insecure(self._insecure_seed, "noise", server_round)

    def _scheduled(self) -> CentralDPPlan:
        """Return the schedule; it is made once the number of clients is known."""
        if self.schedule is None:
            rounds = self._rounds or self.planned_rounds
            if rounds is None:
                raise InvalidParameterError(
                    "rounds", rounds, "the rounds to spread the budget over, under your own start"
                )
            asked, self._population = self.federation.sample_size(
                fraction=self.fraction_train, minimum=self.min_train_nodes
            )
            q = min(1.0, asked / self._population)
            self.schedule = CentralDPPlan(**self._budget, rounds=rounds, q=q)
        return self.schedule

    def _plan(self, asked: int, norm: float) -> CentralDPTerms:
        """Return the round config for a cohort size and a clipping norm."""
        schedule, parties = self._scheduled(), 1
        if self._mode["noise"] == DISTRIBUTED and self.secure_sum is not None:
            parties = self.secure_sum.parties_of(asked)
        bits = self._clipping["grid_bits"]
        if bits is None:
            spread = schedule.update_noise_multiplier * sensitivity(1.0, **self._mode)
            reach = 1 + SHARE_REACH * spread / math.sqrt(parties)
            bits = max(1, min(_GRID_BITS, math.floor(math.log2(CODE_LIMIT / reach)) - 1))
        return CentralDPTerms(
            **self._mode,
            sampling_rate=schedule.sampling_rate,
            noise_multiplier=schedule.noise_multiplier,
            count_share=schedule.count_share,
            epsilon=schedule.epsilon,
            delta=schedule.delta,
            gap=schedule.gap,
            clipping_norm=norm,
            grid=CodeGrid.below(norm, bits=bits).exponent,
            parties=parties,
            keep_back=tuple(self._clipping["keep_back"]),
        )

    def _bounds(self, secure_sum: SecureSum, cohort: int) -> Bounds:
        # The clipping norm of the next round is not known when its secrets are dealt, but a grid
        # has the most steps up to this one.
        limit = self._plan(cohort, _WIDEST).code_limit()
        return secure_sum.bounds(cohort, code_limit=min(limit, CODE_LIMIT), largest_weight=1)

    def _checked_sum(self, secure_sum: SecureSum | None) -> SecureSum | None:
        if self._mode["noise"] == DISTRIBUTED and secure_sum is None:
            return SecureSum()
        if self._amplified and secure_sum is not None:
            raise InvalidParameterError(
                "secure_sum",
                secure_sum,
                "None with noise = 'server' and sampling = 'poisson': the clients of a secure sum "
                "know who takes part",
            )
        varies = self._mode["sampling"] == POISSON and isinstance(secure_sum, SecureSum)
        if varies and secure_sum is not None and secure_sum.threshold is not None:
            raise InvalidParameterError(
                "secure_sum.threshold",
                secure_sum.threshold,
                "none with sampling = 'poisson': the size of a cohort varies",
            )
        return secure_sum

    def _checked_seed(self, seed: int | None) -> int | None:
        if seed is None:
            return None
        if self._mode["noise"] == DISTRIBUTED:
            raise InvalidParameterError("insecure_seed", seed, "None: the clients draw the noise")
        return check_integer("insecure_seed", seed, minimum=0)
