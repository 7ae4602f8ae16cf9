"""The transport by secure sums: clients send masked vectors, and the server sees their sum.

A sum takes two exchanges. In the first the clients send masked vectors; in the second they reveal
what takes the masks off the sum, and those of the next sum deal its secrets. So the next sum's
clients are drawn one round ahead. The first round takes two more exchanges, for keys and shares.

The next sum is that of the next round, or a later step of the same round, over the same clients.
"""

import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.secure_sum import Bounds, MaskedSum, NotOpenedError, SecureSum, Session
from flwr_privacy.secure_sum.conflicts import Conflict, apart, liars
from flwr_privacy.secure_sum.graph import rosters
from flwr_privacy.secure_sum.masked import vector_size
from flwr_privacy.secure_sum.messages import JOIN, OWN
from flwr_privacy.secure_sum.secrets import words
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.messenger import Assigned, Messenger, only
from flwr_privacy.strategies.requests.request_log import RequestLog
from flwr_privacy.strategies.state.experiment import Experiment
from flwr_privacy.wire.digests import request_digest
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.pins import Pins

from .sum_exchanges import Dealing, Revealing, SumExchanges, names_in
from .sum_guarantee import SumGuarantee, is_complete
from .transport import Draw

__all__ = ["Summed", "check_summed", "opened_mean"]

logger = logging.getLogger("flwr.privacy")

_WRONG = "the sum is of no vectors that are allowed: somebody sent a wrong one"

BoundsOf = Callable[[list[str], int], Bounds]
"""Gives the bounds of vectors in a round: of the clients drawn; at a later step, of those left."""


def check_summed(settings: SecureSum, scheme: str, summable: bool) -> None:
    """Refuse a secure sum if the scheme does not allow one.

    Raises
    ------
    InvalidParameterError
        If it is so.
    """
    if not isinstance(settings, SecureSum):
        raise InvalidParameterError("secure_sum", settings, "a SecureSum, or None")
    if not summable:
        allowed = f"None: the answers of '{scheme}' are no codes on a grid"
        raise InvalidParameterError("secure_sum", settings, allowed)


class Summed:
    """The secure sums of one training.

    Parameters
    ----------
    settings : SecureSum
        The user's parameters.
    messenger : Messenger
        How the clients are talked to.
    experiment : Experiment
        Gives identity and seed, for the sessions and their graphs.
    phases : collection of str
        The phases whose answers are summed.
    draw : callable
        Draws the clients of a round.
    is_last : callable
        Tells whether a round is the last one.
    bounds_of : callable
        Bounds of the vectors.
    needed : callable
        Returns the clients without whose vectors the sum of the next round is not opened.
    lacking : callable
        Is told which of them a sum lacked, or which contradict each other.
    pins : Pins, optional
        The clients' long-term keys. The server then passes on no key that its client has not
        signed: nodes that pin each other refuse a cohort with such a key.
    """

    def __init__(
        self,
        settings: SecureSum,
        messenger: Messenger,
        experiment: Experiment,
        *,
        phases: Collection[str],
        draw: Draw,
        is_last: Callable[[int], bool],
        bounds_of: BoundsOf,
        needed: Callable[[], Collection[str]] = tuple,
        lacking: Callable[[Collection[str]], None] = lambda clients: None,
        pins: Pins | None = None,
    ) -> None:
        self._settings = settings
        self._experiment = experiment
        self._phases = phases
        self._draw = draw
        self._is_last = is_last
        self._bounds_of = bounds_of
        self._needed = needed
        self._lacking = lacking
        self._exchanges = SumExchanges(messenger, experiment, pins=pins)
        self._guarantee = SumGuarantee()
        self._grid: Grid | None = None  # of the round that was prepared
        self._now: Dealing | None = None
        self._next: Dealing | None = None
        self._conflicts: set[Conflict] = set()
        self._summed = 0

    def prepare(self, grid: Grid, server_round: int) -> None:
        """Run secret sharing for the clients of a round, unless they have dealt already.

        Raises
        ------
        NotOpenedError
            If too few did.
        InvalidParameterError
            If threshold, colluders, modulus or neighbours do not fit the cohort.
        """
        self._grid, self._summed = grid, 0
        self._exchanges.learn_keys(grid, server_round)
        # The clients of this round may have dealt when the last sum was opened.
        self._now, self._next = self._next, None
        if self._now is not None and self._now.session.server_round == server_round:
            self._take_conflicts(self._now.session)
            try:
                self._now.session.check_dealers()
                return
            except NotOpenedError as error:
                logger.warning("%s; asked again", error)
                self._note_lacking(self._now.session, self._now.session.dealers)
        self._now = self._new_session(grid, server_round)
        self._exchanges.share(grid, server_round, revealing=None, dealing=self._now)
        self._take_conflicts(self._now.session)
        self._note_lacking(self._now.session, self._now.session.dealers)
        self._now.session.check_dealers()

    @property
    def cohort(self) -> int:
        """Largest number of clients in the sum; at the first step some may not have dealt."""
        return self._current().session.bounds.cohort

    def clients(self, grid: Grid, server_round: int) -> Assigned:
        """Return the clients to ask for a vector: those that dealt."""
        session, assigned = self._current()
        return only(assigned, set(session.dealers))

    def quorum(self, quorum: int | None) -> int | None:
        """Return the number of vectors after which a round ends, enough to open its sum.

        At a later step these are all.

        Raises
        ------
        InvalidParameterError
            If the user's is below the threshold in the first round; where it gets below as clients
            join, it is raised.
        """
        least = self._current().session.least
        if quorum is None or quorum >= least:
            return quorum
        if not self._guarantee.least:
            raise InvalidParameterError(
                "quorum", quorum, f"at least the threshold of the secure sum, {least}"
            )
        return least

    def question(
        self, phase: str, content: RecordDict, own: Mapping[str, RecordDict]
    ) -> tuple[RecordDict, Mapping[str, RecordDict]]:
        """Return a request for vectors, with fields on their sum for all and for each client."""
        if phase not in self._phases:
            return content, own
        session, _ = self._current()
        if session.step == 0:  # a later sum is over all that are in the first one
            self._guarantee.note(self._settings, session)
        # All that a client's digest of its question covers: the server hashes what all are told.
        common = {"session": session.name, "threshold": session.threshold, **write(session.bounds)}
        joined = {client: write(session.joined(client)) for client in session.dealers}
        if is_complete(session):
            for place in joined.values():
                common |= {key: place.pop(key) for key in ("dealers", "mask-keys")}
        places = {
            client: RecordDict({**own.get(client, {}), JOIN: ConfigRecord(place)})
            for client, place in joined.items()
        }
        return RecordDict({**content, JOIN: ConfigRecord(common)}), places

    def accumulator(self, phase: str, empty: WeightedMean) -> WeightedMean:
        """Return an empty sum of masked vectors with room for the scheme's codes and the weight."""
        if phase not in self._phases:
            return empty
        return MaskedSum(vector_size(empty), self._current().session.bounds.modulus_bits)

    def opened(
        self, heard: WeightedMean, request_log: RequestLog, instruction: Instruction
    ) -> WeightedMean:
        """Open the sum into the scheme's accumulator; return an empty one if that fails."""
        if not isinstance(heard, MaskedSum):
            return heard
        session, _ = self._current()
        for client, dealers in request_log.refused_peers.items():
            session.take_accusation(client, dealers)
        mean = instruction.accumulator()
        asked, request_log.question = request_log.question, RecordDict()  # it holds a model
        if heard.weight:
            try:
                digest = request_digest(asked, without=OWN)
                mean = self._open(heard, mean, digest, instruction.again)
                mean.merge_metrics(heard)
            except NotOpenedError as error:
                logger.warning("%s", error)
        self._note_lacking(session, heard.clients)
        self._take_conflicts(session)
        return mean

    def go_on(self) -> None:
        """Move to the round's next step, whose secrets were dealt when the last sum was opened.

        Raises
        ------
        NotOpenedError
            If anybody who is in the last sum has not dealt. The round is over then: a sum over
            fewer clients would give a vector away.
        """
        following, self._next = self._next, None
        if following is None or following.session.step == 0:
            raise ProtocolError("the last sum was not opened with again=True")
        self._take_conflicts(following.session)
        following.session.check_dealers()
        self._now = following

    def metrics(self) -> dict[str, float]:
        """Return the numbers of a round, for the history."""
        if self._now is None:
            return {"sum_opened": 0}
        session, _ = self._now
        return {
            "sum_cohort": len(session.rosters),
            "sum_dealers": len(session.dealers),
            "sum_threshold": session.threshold,
            "sum_opened": self._summed,
            "sum_modulus_bits": session.bounds.modulus_bits,
        }

    def extend_guarantee(self, guarantee: Guarantee) -> Guarantee:
        """Add to a scheme's guarantee what the server does not see of the sums so far."""
        return replace(guarantee, secure_sum=self._guarantee.text())

    def state(self) -> dict[str, int]:
        """Return the guarantee of the sums so far, for a checkpoint."""
        return dict(self._guarantee.least)

    def load_state(self, state: dict[str, int]) -> None:
        """Restore what `state` returned."""
        self._guarantee.least = dict(state)

    def _current(self) -> Dealing:
        if self._now is None:
            raise ProtocolError(
                "secure_sum: works only where this strategy's own start runs the rounds"
            )
        return self._now

    def _open(
        self, masked: MaskedSum, empty: WeightedMean, asked: bytes, again: bool
    ) -> WeightedMean:
        """Open a sum; ask the clients of the next sum to deal in the same exchange.

        Parameters
        ----------
        masked : MaskedSum
            Sum of the masked vectors.
        empty : WeightedMean
            The scheme's accumulator.
        asked : bytes
            Digest of what the clients were asked.
        again : bool
            Whether the next sum is a later step of this round, over the clients in this sum.
            `go_on` makes it the current one.

        Raises
        ------
        NotOpenedError
            If it cannot be opened: too few clients are left; or if the parameters do not fit those
            of the next step. Nothing is opened then.
        """
        session, assigned = self._current()
        survivors = sorted(masked.clients)
        session.check_survivors(survivors)
        answering = {client for client in survivors if session.can_answer(client, survivors)}
        self._next = None  # also where there is no later step
        self._next = self._next_step(survivors, asked) if again else self._next_round()
        # One exchange opens this sum and has the clients of the next one deal.
        self._exchanges.share(
            self._connected(),
            session.server_round,
            revealing=Revealing(session, only(assigned, answering), survivors),
            dealing=self._next,
        )
        values = session.open(masked.total, survivors, asked)
        self._summed = len(survivors)
        return opened_mean(empty, values, survivors, session.bounds)

    def _note_lacking(self, session: Session, there: Collection[str]) -> None:
        if lacking := set(session.needed).difference(there):
            self._lacking(lacking)

    def _take_conflicts(self, session: Session) -> None:
        """Leave out liars, and have the next clients drawn anew if there are new conflicts."""
        found = session.conflicts - self._conflicts
        if not found and not session.misfits:
            return
        for one, other in sorted(map(sorted, found)):
            logger.warning("clients %s and %s contradict each other", one, other)
        if among := {client for pair in found if pair <= set(session.needed) for client in pair}:
            self._lacking(among)
        most = session.liars_around
        false = {
            client: f"it contradicts more than {most(client)} others of a secure sum"
            for client in liars(session.conflicts, most)
        } | session.misfits
        self._exchanges.leave_out(false)
        both = self._conflicts | found
        self._conflicts = {pair for pair in both if not pair & false.keys()}
        if self._next is not None and self._next.session.step == 0:
            dropped, self._next = self._next.session, None
            self._take_conflicts(dropped)

    def _connected(self) -> Grid:
        if self._grid is None:
            raise ProtocolError("a round is asked that was not prepared")
        return self._grid

    def _next_round(self) -> Dealing | None:
        server_round = self._current().session.server_round
        if self._is_last(server_round):
            return None
        try:
            return self._new_session(self._connected(), server_round + 1)
        except NotOpenedError as error:  # the next round will try again
            logger.warning("%s", error)
            return None

    def _next_step(self, survivors: list[str], asked: bytes) -> Dealing:
        session, assigned = self._current()
        try:
            bounds = self._bounds_of(survivors, session.server_round)
        except InvalidParameterError as error:
            following = words(session.server_round, session.step + 1)
            raise NotOpenedError(f"there is no sum of {following}: {error}") from error
        following_step = session.go_on(secrets.token_hex(16), survivors, bounds, asked)
        return Dealing(following_step, only(assigned, set(survivors)))

    def _new_session(self, grid: Grid, server_round: int) -> Dealing:
        drawn, seed = self._draw(grid, server_round), self._experiment.seed
        known = set(names_in(drawn)).intersection(self._exchanges.keys)
        needed = list(self._needed())
        together = apart(
            known, self._conflicts, seed=seed, server_round=server_round, needed=needed
        )
        assigned = only(drawn, together)
        asked, cohort = names_in(drawn), names_in(assigned)
        none = f"there is no sum of round {server_round}"
        first = not self._guarantee.least
        try:
            bounds = self._bounds_of(asked, server_round)
            threshold = self._settings.threshold_of(len(asked))
            most = self._settings.liars_of(len(asked))
        except InvalidParameterError as error:
            if first:
                raise
            # Clients have left since the parameters were found to fit.
            raise NotOpenedError(f"{none}: {error}") from error
        if first:  # what does not fit all that were drawn ends the run
            rosters(asked, self._settings, seed=seed, server_round=server_round)
        if len(cohort) < threshold:
            raise NotOpenedError(
                f"{none}: {len(cohort)} of at least {threshold} clients have a key and do not "
                f"contradict each other, {threshold - len(cohort)} are missing"
            )
        if missing := sorted(set(needed).difference(cohort)):
            raise NotOpenedError(
                f"{none}: {missing}, whom it needs, are not there, have no key or contradict others"
            )
        try:
            graph = rosters(
                cohort, self._settings, seed=seed, server_round=server_round, drawn=len(asked)
            )
        except InvalidParameterError as error:
            raise NotOpenedError(f"{none}: {error}") from error
        session = Session(
            name=secrets.token_hex(16),
            experiment_id=self._experiment.id,
            server_round=server_round,
            rosters=graph,
            keys=self._exchanges.keys,
            threshold=threshold,
            bounds=bounds,
            liars=most,
            needed=needed,
        )
        return Dealing(session, assigned)


def opened_mean(
    mean: WeightedMean, values: NDArray[np.int64], survivors: list[str], bounds: Bounds
) -> WeightedMean:
    """Return an accumulator that holds an opened sum.

    Parameters
    ----------
    mean : WeightedMean
        The scheme's empty accumulator.
    values : (d,) int64
        Sum of the vectors: the arrays of the template in the order of their names, the weight.
    survivors : list of str
        Whose vectors are in it.
    bounds : Bounds
        What each of them should have kept to.

    Raises
    ------
    NotOpenedError
        If no vectors within the bounds have such a sum: somebody sent a wrong one.
    """
    weight = int(values[-1])
    largest = int(max(values[:-1].max(initial=0), -values[:-1].min(initial=0)))
    heaviest = min(bounds.weight_limit, len(survivors) * bounds.largest_weight)
    # A wrong vector cannot be seen under its masks: at least the sum must be possible.
    if not 0 <= weight <= heaviest or largest > weight * bounds.code_limit:
        raise NotOpenedError(_WRONG)
    arrays, place = {}, 0
    for name in sorted(mean.template):
        shape, _ = mean.template[name]
        size = int(np.prod(shape, dtype=np.int64))
        arrays[name] = values[place : place + size].reshape(shape)
        place += size
    try:
        return mean.from_state(arrays, {"weight": float(weight), "clients": survivors})
    except ReplyRefusedError as error:  # what a scheme knows of its sums beside the bounds
        raise NotOpenedError(f"{_WRONG} ({error})") from error
