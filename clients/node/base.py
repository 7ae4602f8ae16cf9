"""The base of all client halves: one class, with a method for each kind of message.

`SchemeClient.handle` is where a scheme does its work. The mod (for Message-API apps) and
`numpy_client_app` (for NumPyClient apps) are two thin faces of it, see
`flwr_privacy.clients.node.adapters`.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from flwr.app import Context
from flwr.client import NumPyClient

from flwr_privacy.errors import ProtocolError
from flwr_privacy.pipeline.answer import answer, answer_step, answer_unprotected
from flwr_privacy.pipeline.mechanism import Answer, ProtocolStep, Release, Unprotected
from flwr_privacy.pipeline.node_store import NodeRules
from flwr_privacy.pipeline.operator_checks import check_summed, check_unaccounted
from flwr_privacy.pipeline.request import request_of
from flwr_privacy.privacy.averaging import Metrics, WeightedMean
from flwr_privacy.wire.arrays import Arrays, zeros_like
from flwr_privacy.wire.frozen import FROZEN
from flwr_privacy.wire.message import EVALUATE, METRICS, RECORD, TRAIN, Fields

from .context_store import ContextStore, is_simulated_client, refuse_node_keys, rules_of
from .rehearsal import loading

if TYPE_CHECKING:
    from .generated import RecordLayout

__all__ = ["Evaluate", "SchemeClient", "Train", "Trained"]

logger = logging.getLogger("flwr.privacy")


class Trained(NamedTuple):
    """The result of the user's local training: arrays, and metrics with the weight."""

    arrays: Arrays
    metrics: Metrics


Train = Callable[[Arrays], Trained]
"""The user's local training: from the arrays to start at to the arrays where it ended."""

Evaluate = Callable[[], Metrics]
"""The user's evaluation of a model on its own data: its metrics."""

_NUM_EXAMPLES = "num-examples"

_ZERO = "Where it fails, that is charged and counts as a training that changed nothing"


class SchemeClient(NumPyClient):
    """Base of the client halves.

    Parameters
    ----------
    inner : NumPyClient, optional
        The user's client, where the scheme wraps a NumPyClient app.
    context : Context, optional
        Flower's context of this client.

    Attributes
    ----------
    scheme : str
        Name of the scheme on the wire.
    phases : frozenset of str
        Phases of the scheme's ``train`` messages, besides ``hello``.
    bare : bool
        Whether messages that are not of this library reach the user's training and evaluation. A
        scheme that protects something says no: otherwise a server could leave out the record and
        get the bare update.
    guarantees_dp : bool
        Whether the scheme promises differential privacy. Then its client half gives an answer
        without noise only where the node's operator or a simulation allows it: it asks
        `check_unaccounted` before it does.
    sums : {"never", "may", "only"}
        Whether the client can send its answers, which are codes on a grid then, into a secure sum.
    sums_evaluations : bool
        Whether its answers to evaluations can go into a secure sum, too.
    records : RecordLayout, optional
        What the app's records look like, set in a class of the app's own. It says that the training
        reads data through `flwr_privacy.clients.own_data` alone. Then it is rehearsed on generated
        records before the first charge of an experiment, where all data of a client are protected.
    steps : frozenset of str
        Phases that need none of the user's code: neither its training nor its data. A node that
        runs several clients reads such a request once for all of them, and sends their answers,
        whose arrays nobody changes any more, as rows. A subclass whose `handle` trains in one of
        them leaves it out.
    keeps_statistics : bool
        Whether the running statistics of normalisation layers stay where they are. A training
        request is refused then if it does not say which arrays are statistics and the model looks
        as if some were.
    """

    scheme: ClassVar[str]
    phases: ClassVar[frozenset[str]] = frozenset({"train"})
    bare: ClassVar[bool] = False
    guarantees_dp: ClassVar[bool] = False
    sums: ClassVar[str] = "never"
    sums_evaluations: ClassVar[bool] = False
    steps: ClassVar[frozenset[str]] = frozenset()
    keeps_statistics: ClassVar[bool] = False
    records: "ClassVar[RecordLayout | None]" = None
    opened: tuple[Context, ContextStore] | None = None
    """The node store that the last release has opened, and of which context."""

    def __init__(self, inner: NumPyClient | None = None, context: Context | None = None) -> None:
        self.inner = inner
        self.context = context

    def release(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> Release | Unprotected | ProtocolStep:
        """Return the release for one message of the scheme.

        The pipeline carries it out (`flwr_privacy.pipeline.answer`): a client half never sees
        ledger, policy or keys. Parameters are those of `handle`.
        """
        raise NotImplementedError

    def release_of_evaluation(
        self, arrays: Arrays, fields: Fields, evaluate: Evaluate
    ) -> Release | Unprotected:
        """Return the release for an evaluation; parameters are those of `handle_evaluation`."""
        raise NotImplementedError

    def handle(self, phase: str, arrays: Arrays, fields: Fields, train: Train) -> Answer:
        """Answer one message of the scheme; by default carries out its `release`.

        Parameters
        ----------
        phase : str
            One of `phases`.
        arrays : Mapping of str to ndarray
            The arrays of the message.
        fields : dict
            The scheme's own values in the message, and ``experiment-id``, ``round`` and
            ``request``, which together with the phase name the request; ``summed``, the least
            number of clients in the secure sum, and ``code-limit``, the largest code that it takes:
            both 0 outside of one.
        train : callable
            The user's local training; called only if the phase asks for it.

        Returns
        -------
        arrays : Mapping of str to ndarray
            Arrays of the reply.
        fields : dict
            The scheme's own values of the reply. ``metrics`` holds what goes into the reply's
            MetricRecord (it leaves the node like everything else).

        Raises
        ------
        DeclinedError, LedgerError, ChargedFailureError, InvalidParameterError, ProtocolError
            See `flwr_privacy.pipeline.answer.answer`.
        """
        return self._released(phase, arrays, fields, self.release(phase, arrays, fields, train))

    def introduce(self, experiment_id: str) -> Fields:
        """Return the client's fields of the hello, e.g. public keys; by default none.

        The names ``client-id``, ``plays``, ``storage``, ``identity`` and ``identity-signature`` are
        taken. A client with a long-term key signs all of them for the server.

        Parameters
        ----------
        experiment_id : str
            The experiment that it is asked about.
        """
        return {}

    def handle_evaluation(self, arrays: Arrays, fields: Fields, evaluate: Evaluate) -> Metrics:
        """Evaluate a model on the client's data; refuses by default.

        Parameters
        ----------
        arrays : Mapping of str to ndarray
            The model.
        fields : dict
            As those of `handle`.
        evaluate : callable
            The user's evaluation of that model.

        Returns
        -------
        Mapping of str to number
            What leaves the node.

        Raises
        ------
        ProtocolError
            If the scheme releases nothing of an evaluation; otherwise as `handle`.
        """
        if type(self).release_of_evaluation is not SchemeClient.release_of_evaluation:
            release = self.release_of_evaluation(arrays, fields, evaluate)
            metrics: Metrics = self._released(EVALUATE, arrays, fields, release)[1][METRICS]
            return metrics
        raise ProtocolError(
            f"a client under the scheme '{self.scheme}' releases nothing of an evaluation: "
            "evaluate on the server (fraction_evaluate = 0)"
        )

    def answer_evaluation(self, arrays: Arrays, fields: Fields, evaluate: Evaluate) -> Answer:
        """Return the answer to an evaluation; by default the metrics of `handle_evaluation`.

        Parameters and errors are those of `handle_evaluation`.
        """
        return {}, {METRICS: self.handle_evaluation(arrays, fields, evaluate)}

    def rehearsal(self, start: Arrays, fields: Fields, train: Train) -> Callable[[], None] | None:
        """Return a function that tries a training on generated records, or says that it cannot.

        A simulated client says nothing where its app declares no records: its failures are loud.
        Where the question has frozen weights, the training is first tried up to where it has loaded
        its model.

        Parameters
        ----------
        start : Mapping of str to ndarray
            The model; zeros take its place, or made-up values where a part of it is trained.
        fields : dict
            As those of `handle`.
        train : callable
            The user's local training.
        """
        layout, simulated = self.records, is_simulated_client(self._context())
        if layout is None and simulated and FROZEN not in fields:
            return None

        def rehearse() -> None:
            self.check_model(start, fields, train)
            if layout is None and simulated:
                return
            if layout is None:
                logger.warning(
                    "the training is not rehearsed: the app declares no records. %s", _ZERO
                )
                return
            from .generated import trial  # late: most apps declare no records

            with trial(layout) as tried:
                try:
                    train(zeros_like(start))
                except Exception:
                    # Without `own_data` it may have failed on data that it keeps somewhere.
                    if tried.asked or simulated:
                        raise
            if not tried.asked:
                logger.warning("the training is not rehearsed: it did not call own_data. %s", _ZERO)
                return
            logger.info(
                "the training was rehearsed on %d generated records in %.3g s",
                *(layout.count, tried.seconds),
            )

        return rehearse

    def check_model(self, start: Arrays, fields: Fields, train: Train) -> None:
        """Try a training up to where it has loaded its model, and report what is wrong with that.

        Without frozen weights in the question it does nothing. What else the user's code raises may
        be a matter of its data, and is not told for nothing: only simulated clients tell it.

        Parameters
        ----------
        start, fields, train
            As those of `rehearsal`.

        Raises
        ------
        InvalidParameterError
            If the frozen weights, or the arrays that are trained, are not those of the question.
        """
        if FROZEN not in fields:
            return
        from .generated import trial  # late: most apps declare no records

        layout, simulated = self.records, is_simulated_client(self._context())
        with trial(layout) if layout is not None else nullcontext(), loading() as model:
            try:
                train(zeros_like(start))
            except Exception:
                if simulated:
                    raise
        if model.error is not None:
            raise model.error
        if not model.done and not simulated:
            logger.warning("the training's model is not checked before the first charge. %s", _ZERO)

    def place(self) -> str:
        """Return a unique name of the client: the place of its persistent state."""
        store = self._store()
        return f"{store.folder}/{store.client_id}"

    def _store(self) -> ContextStore:
        self.opened = self._context(), ContextStore.of(self._context())
        return self.opened[1]

    def _released(
        self,
        phase: str,
        arrays: Arrays,
        fields: Fields,
        release: Release | Unprotected | ProtocolStep,
    ) -> Answer:
        refuse_node_keys("message", fields)
        given = (self.scheme, phase, fields, self.guarantees_dp)
        if isinstance(release, Unprotected):
            return answer_unprotected(self._rules(), release, *given)
        if isinstance(release, ProtocolStep):
            return answer_step(self._store(), release, *given)
        request = request_of(arrays, *given)
        return answer(self._store(), request, release)

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return an empty accumulator for the replies of several clients on one node.

        Parameters
        ----------
        phase : str
            Phase of the request.
        arrays, fields
            What of the request all clients share; ``groups`` of the fields has the group of each
            client, in a scheme that sums by groups.
        """
        return WeightedMean(arrays if phase == TRAIN else {})

    def local_training(self, config: Mapping[str, Any], names: list[str]) -> Train:
        """Return the inner NumPyClient's ``fit`` as a function on named arrays."""
        inner = self._inner()

        def train(arrays: Arrays) -> Trained:
            # Copies: a client may train in place, and the arrays may be views into a message.
            start = [np.array(array) for array in arrays.values()]
            parameters, examples, metrics = inner.fit(start, dict(config))
            numbers = numbers_of(metrics)
            trained = dict(zip(names_of(names, len(parameters)), parameters, strict=True))
            return Trained(trained, {**numbers, _NUM_EXAMPLES: examples})

        return train

    def fit(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        """Train outside of any scheme, for a server without this library.

        Raises
        ------
        ProtocolError
            If the scheme does not allow it.
        """
        return self._bare_inner().fit(parameters, config)

    def evaluate(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Evaluate outside of any scheme, under the conditions of `fit`."""
        return self._bare_inner().evaluate(parameters, config)

    def get_parameters(self, config: dict[str, Any]) -> list[Any]:
        """Return the inner client's parameters, under the conditions of `fit`."""
        return self._bare_inner().get_parameters(config)

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the inner client's properties, under the conditions of `fit`."""
        return self._bare_inner().get_properties(config)

    def local_evaluation(self, arrays: Arrays, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of the inner NumPyClient's ``evaluate``."""
        parameters = [np.array(array) for array in arrays.values()]
        loss, examples, metrics = self._inner().evaluate(parameters, dict(config))
        return {**numbers_of(metrics), "loss": float(loss), _NUM_EXAMPLES: int(examples)}

    def check_unaccounted(self, *, sigma: float | None = 0.0) -> None:
        """Decline an uncharged answer that the node's operator does not allow.

        See `flwr_privacy.pipeline.operator_checks.check_unaccounted`.
        """
        check_unaccounted(
            self._rules(), scheme=self.scheme, guarantees_dp=self.guarantees_dp, sigma=sigma
        )

    def _rules(self) -> NodeRules:
        return rules_of(self._context())

    def _context(self) -> Context:
        if self.context is None:
            raise TypeError(f"{type(self).__name__} needs the context: give it as second argument")
        return self.context

    def check_bare(self) -> None:
        """Refuse to work outside of the scheme unless the scheme and the node's policy allow it.

        Raises
        ------
        ProtocolError
            If the scheme does not allow it; the node's log has it too.
        DeclinedError
            If the policy does not.
        LedgerError
            If the policy cannot be read.
        """
        if not self.bare:
            text = bare_refusal(self.scheme)
            logger.warning("refused: %s", text)
            raise ProtocolError(text)
        check_summed(self._rules())
        self.check_unaccounted()

    def _bare_inner(self) -> NumPyClient:
        self.check_bare()
        return self._inner()

    def _inner(self) -> NumPyClient:
        if self.inner is None:
            raise TypeError(f"{type(self).__name__} wraps no client: give it one as `inner`")
        return self.inner


def bare_refusal(scheme: str) -> str:
    """Return the error text of a node that refuses to work outside its scheme."""
    return (
        f"this node works under the scheme '{scheme}' only: the message has no record "
        f"'{RECORD}'; use the strategy of '{scheme}' on the server"
    )


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numeric metrics, NumPy's included, as Python numbers."""
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in metrics.items()}
    return {
        key: value
        for key, value in plain.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def names_of(names: list[str], count: int) -> list[str]:
    """Return the names of a NumPyClient's arrays, which have none of their own."""
    # A NumPyClient loses the names; they are those of the message where the number agrees.
    return names if len(names) == count else [str(index) for index in range(count)]
