"""The setup of ACFL on the server: has clients encode their data, and keeps the coded data."""

import logging
import math
from functools import partial

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.acfl.descent import ACFLDescent
from flwr_privacy.acfl.encoding import Moments
from flwr_privacy.acfl.members import CodedMembers
from flwr_privacy.acfl.options import Noise, Weighting
from flwr_privacy.acfl.plan import ACFLOptions, ACFLPlan
from flwr_privacy.acfl.sums import coded_sum
from flwr_privacy.acfl.terms import RECORD
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.privacy.grid import CODE_LIMIT
from flwr_privacy.secure_sum import NotOpenedError
from flwr_privacy.strategies.budget import rounds_of
from flwr_privacy.strategies.loop.base import SchemeStrategy
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.ledger_heads import ChargeName
from flwr_privacy.strategies.requests.messenger import Assigned, only
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.message import TRAIN

__all__ = ["CodedSetup"]

logger = logging.getLogger("flwr.privacy")

SETUP = "setup"


class CodedSetup(SchemeStrategy):
    """Base of `ACFL`: asks the clients to encode their data once, and records which did."""

    privacy: Noise
    weighting: Weighting
    rounds: int | None
    descent: ACFLDescent

    options: ACFLOptions
    _set_up: CodedMembers
    _quorum: tuple[int, int, int] | None

    @property
    def members(self) -> list[str]:
        """The clients that were set up."""
        return self._set_up.names

    @property
    def coded(self) -> Moments | None:
        """The global coded data set, once there is one."""
        coded = self._set_up.coded
        return None if coded is None else coded.moments

    def setup(self, grid: Grid) -> None:
        """Ask every client to encode its data, once per experiment.

        Raises
        ------
        ProtocolError
            If no client does, or too few for a secure sum.
        InvalidParameterError
            If the noise is too little for the codes, or there is no one matrix to train.
        """
        self._check_begin()
        if not self.weighting.needs_setup:
            return
        if self._set_up.coded is not None:  # resumed; clients may have come meanwhile
            self._take_in(grid, 0, self.federation.clients())
            return
        with self.messenger.patiently():
            try:
                self.transport.prepare(grid, 0)
            except NotOpenedError as error:
                raise ProtocolError(
                    f"the setup cannot be summed: {error}; no data were asked for: start again"
                ) from error
            self._ask_for_codes(grid, 0, self.transport.clients(grid, 0))
        if self._set_up.coded is None:
            log = self.messenger.request_log(SETUP)
            said = "; ".join(log.details) or (
                "their sum was not opened" if log.accumulated else "no client answered"
            )
            again = (
                "with a new experiment_id, as each client answers once" if self.secure_sum else ""
            )
            raise ProtocolError(
                f"the setup failed, there are no coded data: {said}; nothing was trained: start "
                f"again {again}".rstrip()
            )

    def _take_in(self, grid: Grid, server_round: int, clients: list[str]) -> None:
        """Ask clients that join later to encode their data; impossible under a secure sum."""
        if lacking := sorted(self._without_rate().intersection(clients)):
            logger.warning("clients %s have no straggler_rate and take no part", lacking)
        new = set(clients) - set(self.members) - self._without_rate()
        if not self.weighting.needs_setup or not new:
            return
        if self.secure_sum is not None:
            logger.warning("clients %s came after the setup and take no part", sorted(new))
            return
        self._ask_for_codes(grid, server_round, only(self._everybody(grid, server_round), new))

    def _check_begin(self) -> None:
        """Refuse options that would fail later, before any request or charge.

        Raises
        ------
        InvalidParameterError
            If the model is no finite matrix, a client has no rate, or a secure sum does not fit
            the clients of a round.
        """
        self._model()
        if self.options.evaluation is not None:
            self._planned().evaluation_terms(parties=0)
        if lacking := sorted(self._without_rate()):
            raise InvalidParameterError(
                "straggler_rate", "a dict", f"a rate for every client, {lacking} among them"
            )
        if self.secure_sum is not None and not self.weighting.coded_only:
            asked, _ = self.messenger.sampler.sample_size(
                fraction=self.fraction_train, minimum=self.min_train_nodes
            )
            self.secure_sum.bounds(asked, code_limit=CODE_LIMIT, largest_weight=1)

    def _ask_for_codes(self, grid: Grid, server_round: int, assigned: Assigned) -> None:
        self._set_up.terms = terms = self._planned().setup_terms(parties=self._parties())
        self.announce()
        set_up = {c for r in self.releases if r.phase == SETUP for c in r.clients}
        charge = terms.charge() if self.privacy.noise == RECORD else None
        instruction = Instruction(
            fields=records.write(terms),
            accumulator=partial(coded_sum, terms),
            large=True,
            # Whoever is asked again sends the same bytes.
            cost=lambda client: None if client in set_up else charge,
            charged_as=lambda client: ChargeName(SETUP, 0, 0),  # whenever the client came
        )
        mean, _ = self.ask(grid, server_round, SETUP, RecordDict(), assigned, instruction)
        asked = {client for clients in assigned.values() for client in clients}
        came = set() if mean is None else set(mean.clients)
        if missing := sorted(asked - came):
            logger.warning("no setup came from %s: they take no part in the training", missing)
        if mean is None:
            return
        self._set_up.join(mean, terms)
        self.descent.renew()

    def _everybody(self, grid: Grid, server_round: int) -> Assigned:
        return self.messenger.sample(grid, server_round, SETUP, fraction=1.0, minimum=1)

    def drawn(self, grid: Grid, server_round: int) -> Assigned:
        """Draw the clients of a round among those that were set up; the setup asks everybody."""
        if server_round == 0:
            return self._everybody(grid, 0)
        if self.fraction_train == 0:
            return {}
        left_out = self._without_rate()
        if self.weighting.needs_setup:
            # Under a secure sum the first round's clients are drawn before the setup is opened.
            members = self.members or self.messenger.request_log(SETUP).used
            left_out |= set(self.federation.clients()).difference(members)
        return self.messenger.sample(
            grid,
            server_round,
            TRAIN,
            fraction=self.fraction_train,
            minimum=self.min_train_nodes,
            without=left_out,
        )

    def _planned(self) -> ACFLPlan:
        features, labels = self._model().shape
        return ACFLPlan(
            options=self.options,
            features=features,
            labels=labels,
            rounds=self._planned_rounds() or 1,
        )

    def _planned_rounds(self) -> int | None:
        """Return the rounds over which a budget is spread; None if there is none."""
        if self.privacy.noise != RECORD:
            return None
        return rounds_of(self.rounds, self.planned_rounds)

    def _parties(self) -> int:
        """Return how many honest clients share the noise of a sum; 0 without a secure sum."""
        if self.secure_sum is None:
            return 0
        self._quorum = self.secure_sum.quorum_of(self.transport.cohort)
        return self.secure_sum.parties_of(self.transport.cohort)

    def _model(self) -> NDArray[np.float64]:
        """Return the model as it is before the step."""
        shapes = {name: np.shape(array) for name, array in self._template.items()}
        if len(shapes) != 1 or any(len(shape) != 2 for shape in shapes.values()):
            raise InvalidParameterError(
                "initial_arrays", shapes, "one matrix of shape (features, labels)"
            )
        (array,) = self._template.values()
        if not np.issubdtype(array.dtype, np.floating):
            raise InvalidParameterError("initial_arrays", str(array.dtype), "a matrix of floats")
        model = np.array(array, np.float64)
        if not np.isfinite(model).all():
            raise InvalidParameterError("initial_arrays", "NaN or infinity", "finite values")
        return model

    def _devices(self) -> int:
        """Return the number of clients in the objective."""
        if self.weighting.needs_setup:
            return len(self.members)
        if self.federation.met:
            return len(self.federation.clients())
        # Under a user's own start, where nobody has said who it is.
        return self.messenger.sampler.sample_size(fraction=1.0, minimum=0)[1]

    def _without_rate(self) -> set[str]:
        """Return the connected clients without a straggler rate, where each client has its own."""
        rates = self.weighting.own_rates
        return set() if rates is None else set(self.federation.clients()).difference(rates)

    def _asked_share(self) -> float:
        """Return the share of all clients that a round asks, connected or not."""
        devices = max(1, self._devices())
        asked = max(math.floor(devices * self.fraction_train + 1e-9), self.min_train_nodes)
        return min(1.0, asked / devices)
