"""Runs one client on a request: calls its client half with the user's training."""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)

from flwr_privacy.errors import (
    DataError,
    DeclinedError,
    FlwrPrivacyError,
    LedgerError,
    ProtocolError,
)
from flwr_privacy.pipeline.users_code import refused_alike
from flwr_privacy.privacy.averaging import Metrics
from flwr_privacy.privacy.running_statistics import check_question
from flwr_privacy.secure_sum.messages import JOIN, KEYS, SHARES
from flwr_privacy.wire.arrays import Arrays, zeros_like
from flwr_privacy.wire.cohort import SUM, Cohort
from flwr_privacy.wire.digests import values_digest
from flwr_privacy.wire.frozen import FROZEN, drawn_like
from flwr_privacy.wire.hello import NONCE, signed
from flwr_privacy.wire.message import (
    EVALUATE,
    HELLO,
    METRICS,
    RECORD,
    TRAIN,
    VERSION,
    Fields,
    Header,
)

from .base import SchemeClient, Train, Trained
from .context_store import (
    check_same_folder,
    identity_of,
    is_simulated_client,
    policy_of,
    refuse_node_keys,
    rules_of,
    shown_head,
    storage,
)
from .node_settings import may_run_any
from .records import RecordArrays, first_array_record, to_record, with_content
from .rehearsal import rehearsing, trying

if TYPE_CHECKING:
    from flwr_privacy.clients.certificates.frozen_weights import FrozenRequest

    from .secure_sum import SumPlace

__all__ = [
    "ARRAYS",
    "App",
    "Run",
    "built",
    "check_round",
    "config_record",
    "discreet",
    "is_of_the_app",
    "read_request",
    "refusing_alike",
    "reply_record",
    "run_client",
    "untold",
]

logger = logging.getLogger("flwr.privacy")

ARRAYS = "arrays"

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class App:
    """The functions of an app: make a client half, train, evaluate.

    Parameters
    ----------
    client : callable
        Builds the client half for a context.
    train : callable
        Returns the user's training for a client half, a message and its context.
    evaluate : callable
        Returns the metrics of the user's evaluation.
    """

    client: Callable[[Context], SchemeClient]
    train: Callable[[SchemeClient, Message, Context], Train]
    evaluate: Callable[[SchemeClient, Message, Context], dict[str, Any]]


def discreet(work: Callable[_Given, _Made], what: str) -> Callable[_Given, _Made]:
    """Wrap a user's training or evaluation so that its errors reveal nothing of the data."""

    def guarded(*given: _Given.args, **named: _Given.kwargs) -> _Made:
        try:
            return work(*given, **named)
        except FlwrPrivacyError as error:
            error.of_users_code = True
            raise
        # Whatever a user's code raises has a text of its own, and the text may have data in it.
        except Exception:
            logger.exception("the client's own %s failed", what)
            refusal = ProtocolError(f"the client's own {what} failed; the log of the node says how")
            refusal.of_users_code = True
            raise refusal from None

    return guarded


def is_of_the_app(message_type: str) -> bool:
    """Tell whether a message type belongs to the app: ``query``, or a named one.

    Flower gives ``train`` and ``evaluate`` without a name to the functions that the scheme is
    around, and what is none of these (``get_parameters``) to a NumPyClient.
    """
    category, _, action = message_type.partition(".")
    if category == MessageType.QUERY:
        return True
    named = action not in ("", "default")
    return named and category in (MessageType.TRAIN, MessageType.EVALUATE)


def built(app: App, context: Context) -> SchemeClient:
    """Build the client half; errors of the user's code are logged here and not sent."""
    try:
        client = app.client(context)
    except FlwrPrivacyError:
        raise
    # It may load data, and the text of its errors may have some in it.
    except Exception:
        logger.exception("the client could not be built")
        raise ProtocolError("the client could not be built; the log of the node says how") from None
    if client.context is None:
        client.context = context  # its node's policy binds it all the same
    return client


@contextmanager
def refusing_alike(client: SchemeClient, context: Context, called: list[str]) -> Iterator[None]:
    """Give all failures of the user's code one fixed text where failures are not charged.

    Those of simulated clients keep theirs. What a scheme refuses before the user's code was
    `called`, and before it looked at data of its own, depends on the request alone.
    """
    try:
        yield
    except Exception as error:
        own = isinstance(error, DataError) or getattr(error, "of_users_code", False)
        if client.guarantees_dp or not (called or own) or is_simulated_client(context):
            raise
        raise refused_alike(rules_of(context).client_id, error) from None


def untold(error: LedgerError) -> str:
    """Log an error in the node's own files; return the fixed error for the server."""
    logger.error("%s", error)
    return "LedgerError: the node's own privacy files cannot be used; the node's log says why"


def run_client(
    app: App,
    client: SchemeClient,
    client_id: str,
    message: Message,
    context: Context,
    *,
    cohort: Cohort | None = None,
) -> RecordDict:
    """Run one client on a request, possibly one to a cohort, and return its reply."""
    header, fields = read_request(client, message)
    run = Run(app, client, client_id, message, context, header, fields)
    if header.phase == HELLO:
        own = {**client.introduce(header.experiment_id), "plays": "one"}
        if may_run_any(context.node_config):
            own |= {"plays": "any", "storage": storage(context)}
        elif client.guarantees_dp:
            own |= shown_head(context, header.experiment_id, empty=True)
        if (identity := identity_of(context)) is not None:
            named = replace(header, client_id=client_id)
            node = message.metadata.dst_node_id
            own = signed(identity, named, own, nonce=fields.get(NONCE), node=node)
        return RecordDict({RECORD: reply_record(header, client_id, own)})
    if cohort is None:
        check_round(header, context)
        if not client.bare:
            check_same_folder(context)
    if header.phase in (KEYS, SHARES):
        from .secure_sum import answer_phase  # late: most clients are in no sum

        records = answer_phase(context, header, message.content)
        return RecordDict({**records, RECORD: reply_record(header, client_id, {})})
    if not client.guarantees_dp:
        # Also a scheme of the user's own that does not ask by itself, whose noise nobody knows.
        client.check_unaccounted(sigma=None)
    # A sum takes the arrays in before anybody trains again.
    local = cohort is not None and cohort.reply == SUM
    if _is_evaluation(message):
        return run.evaluate(local=local)
    return run.handle(local=local)


def _is_evaluation(message: Message) -> bool:
    return message.metadata.message_type.partition(".")[0] == MessageType.EVALUATE


def read_request(client: SchemeClient, message: Message) -> tuple[Header, Fields]:
    """Return the header and the scheme's own fields of a request, if they are for this client."""
    header, fields = Header.read(config_record(message.content, RECORD))
    kind = message.metadata.message_type
    if is_of_the_app(kind):
        # Else a scheme that promises nothing would hand out what the policy keeps in.
        raise ProtocolError(f"a message '{kind}' has the record '{RECORD}': it is the app's own")
    phases = {HELLO, *client.phases}
    if client.sums != "never":
        phases |= {KEYS, SHARES}
    header.check(scheme=client.scheme, phases={EVALUATE} if _is_evaluation(message) else phases)
    refuse_node_keys("message", fields)
    return header, fields


@dataclass(frozen=True, eq=False)
class Run:
    """One client and one request to it, whose header was checked."""

    app: App
    client: SchemeClient
    client_id: str
    message: Message
    context: Context
    header: Header
    fields: Fields

    def evaluate(self, *, local: bool) -> RecordDict:
        """Return what leaves the node of the user's evaluation of a model."""
        client, header, content = self.client, self.header, self.message.content
        arrays, called = RecordArrays(first_array_record(content)), list[str]()
        if JOIN in content and not client.sums_evaluations:
            raise ProtocolError(f"the scheme '{client.scheme}' has no secure sum of evaluations")
        # Outside of a secure sum the scheme's own release says whether it needs one.
        place = _place(client, self.context, header, content) if JOIN in content else None
        fields = self.fields | _named(header, place, _told(content))

        def evaluate() -> Metrics:
            called.append(EVALUATE)
            with self._frozen(arrays) as frozen:
                metrics = self.app.evaluate(client, _asked(self.message), self.context)
                if frozen is not None:
                    frozen.check_loaded()
            return metrics

        with refusing_alike(client, self.context, called):
            out, own = client.answer_evaluation(arrays, fields, discreet(evaluate, "evaluation"))
            metrics = dict(own.pop(METRICS, {}))
            if place is not None:
                out, metrics = place.masked(out, metrics)
            reply = RecordDict({METRICS: MetricRecord(metrics)})
            if out:
                reply[ARRAYS] = to_record(out, local=local)
        reply[RECORD] = self._record(own)
        return reply

    def handle(self, *, local: bool) -> RecordDict:
        """Return what the client half answers, masked where it goes into a secure sum."""
        client, header = self.client, self.header
        arrays, called = RecordArrays(first_array_record(self.message.content)), list[str]()
        place, fields = self.admitted(arrays)

        def train(start: Arrays) -> Trained:
            called.append(TRAIN)
            with self._frozen(start) as frozen:
                if frozen is None:
                    return self._trained(start)
                # A rehearsal that has made-up values of its own compares what it gets with them.
                if rehearsing() and not any(map(np.any, start.values())):
                    start = drawn_like(start)
                trained = self._trained(start)
                return trained._replace(arrays=frozen.trained(start, trained.arrays))

        # What cannot be encoded may tell of data, too.
        with refusing_alike(client, self.context, called):
            out, own = client.handle(header.phase, arrays, fields, discreet(train, "training"))
            metrics = dict(own.pop(METRICS, {}))
            if place is not None:
                out, metrics = place.masked(out, metrics)
            return RecordDict(
                {
                    ARRAYS: to_record(out, local=local),
                    METRICS: MetricRecord(metrics),
                    RECORD: self._record(own),
                }
            )

    def admitted(self, arrays: Arrays) -> "tuple[SumPlace | None, Fields]":
        """Check a request; return the place in its secure sum, and the fields for the client."""
        client, header, content = self.client, self.header, self.message.content
        kind = self.message.metadata.message_type
        if JOIN in content and kind != MessageType.TRAIN:
            raise ProtocolError(f"a secure sum over answers to '{kind}': only 'train' has one")
        # Before the client joins a sum: a refusal must leave no trace there.
        if client.keeps_statistics and header.phase == TRAIN:
            check_question(arrays, self.fields)
        place = _place(client, self.context, header, content)
        return place, self.fields | _named(header, place, _told(content))

    def _trained(self, start: Arrays) -> Trained:
        """Return what the user's training makes of some arrays."""
        if not trying():
            return self.app.train(self.client, _asked(self.message), self.context)(start)
        # The app's state may have data of an earlier training, and must have none of this.
        context = copy.copy(self.context)
        context.state = RecordDict()
        return self.app.train(built(self.app, context), _asked(self.message), context)(start)

    def _frozen(self, arrays: Arrays) -> "AbstractContextManager[FrozenRequest | None]":
        """Open the scope of a question with frozen weights; of another one nothing."""
        digest = self.fields.get(FROZEN)
        if digest is None:
            return nullcontext()
        if not isinstance(digest, bytes):
            raise ProtocolError(f"the field '{FROZEN}' is no SHA-256")
        # Late: most models are trained as a whole.
        from flwr_privacy.clients.certificates.frozen_weights import FrozenRequest, asked_frozen

        return asked_frozen(FrozenRequest(digest, arrays, rehearsed=rehearsing()))

    def _record(self, own: Fields) -> ConfigRecord:
        """Return the record of the reply; read after the charge, the ledger has it."""
        if self.client.guarantees_dp:
            of_context, store = self.client.opened or (None, None)
            head = shown_head(
                self.context,
                self.header.experiment_id,
                empty=False,
                store=store if of_context is self.context else None,
            )
            own = {**own, **head}
        return reply_record(self.header, self.client_id, own)


def _place(
    client: SchemeClient, context: Context, header: Header, content: RecordDict
) -> "SumPlace | None":
    """Join the secure sum that a training request names, if it names one.

    Raises
    ------
    DeclinedError
        If there is none, and the client or its node answers only within one; or as `join`.
    ProtocolError
        If the client's answers cannot be summed; or as `join`.
    """
    if JOIN in content and client.sums == "never":
        raise ProtocolError(
            f"{type(client).__name__} sends what cannot be summed securely: wrap the app in "
            "SecureSumClient"
        )
    if JOIN in content:
        from .secure_sum import join  # late: most clients are in no sum

        return join(context, header, content)
    if client.sums == "only":
        raise DeclinedError(
            f"{type(client).__name__} answers only within a secure sum: give the strategy "
            "secure_sum=SecureSum(...)"
        )
    if client.sums != "never":
        policy_of(context).check_sum(None)
    return None


def _asked(message: Message) -> Message:
    """Return the request for the user's code; in a rehearsal its arrays have no real values.

    Before a charge a server must not choose what that code computes of the data on its way.
    """
    if not rehearsing():
        return message
    content: dict[str, Any] = dict(message.content)
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            content[name] = to_record(zeros_like(RecordArrays(record)))
    return with_content(message, RecordDict(content))


def _told(content: RecordDict) -> bytes:
    """Hash the request's content for the user's code, except the arrays."""
    told: list[Any] = []
    first = True  # record of arrays: the request's, whose values are hashed with it
    for name, record in content.items():
        if name in (RECORD, JOIN):
            continue
        told += [type(record).__name__, name, len(record)]
        if not isinstance(record, ArrayRecord):
            told += [item for entry in record.items() for item in entry]
        elif first:
            first = False
        else:
            told += [[key, a.dtype, list(a.shape), a.data] for key, a in record.items()]
    return values_digest(*told)


def _named(header: Header, place: "SumPlace | None", told: bytes) -> Fields:
    """Return the fields of a client's request that every scheme gets, beside its own."""
    return {
        "told": told,
        "experiment-id": header.experiment_id,
        "round": header.server_round,
        "request": header.request,
        "summed": 0 if place is None else place.believed.clients,
        "honest": 0 if place is None else place.believed.honest,
        "certain": 0 if place is None else place.believed.certain,
        "code-limit": 0 if place is None else place.bounds.code_limit,
        "needed": [] if place is None else place.needed,
        "withstood": 0 if place is None else place.withstood,
    }


def config_record(content: RecordDict, name: str) -> ConfigRecord:
    """Return a record of settings of a message.

    Raises
    ------
    ProtocolError
        If the message has none of that name.
    """
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise ProtocolError(f"the message has no ConfigRecord '{name}'")
    return record


def reply_record(header: Header, client_id: str, fields: Fields) -> ConfigRecord:
    """Return the record of a reply to a request with this header."""
    own = replace(header, client_id=client_id, version=VERSION)
    return ConfigRecord(own.write(fields))


def check_round(header: Header, context: Context) -> None:
    """Check that a request is not for an earlier round than the node's last one.

    Raises
    ------
    ProtocolError
        If it does.
    """
    key = f"{RECORD}.rounds"
    rounds = context.state.get(key, ConfigRecord())
    if not isinstance(rounds, ConfigRecord):
        raise ProtocolError(f"the app's state has something else under '{key}'")
    last = int(str(rounds.get(header.experiment_id, 0)))
    if header.server_round < last:
        raise ProtocolError(
            f"round {header.server_round} does not follow round {last} of this experiment"
        )
    rounds[header.experiment_id] = header.server_round
    context.state[key] = rounds
