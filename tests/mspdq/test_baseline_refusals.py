"""The baselines of MSP and MSPDQ: answers, parameters and questions that are refused."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from apps import make, same
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from mixing_baselines import NBAFL, SCHEMES, listening, run

from flwr_privacy.clients import Trained
from flwr_privacy.errors import (
    DataError,
    DeclinedError,
    FlwrPrivacyError,
    InvalidParameterError,
    ProtocolError,
)
from flwr_privacy.strategies import JoPEQFedAvg, NbAFL, QuantizedFedAvg
from flwr_privacy.wire.arrays import decode_npy
from flwr_privacy.wire.message import RECORD


def cut(reply: Message) -> None:
    _replace_codes(reply, lambda codes: codes[:-1])


def widen(reply: Message) -> None:
    _replace_codes(reply, lambda codes: codes.astype(np.int64))


def spill(reply: Message) -> None:
    def last_bit(codes: Any) -> Any:
        codes[-1] |= 128  # the last byte has bits that belong to no code
        return codes

    _replace_codes(reply, last_bit)


def rename(reply: Message) -> None:
    (name,) = [n for n, r in reply.content.items() if isinstance(r, ArrayRecord)]
    content = RecordDict(dict(reply.content))
    content[name] = ArrayRecord({"others": reply.content[name]["codes"]})
    reply.content = content


def say(**values: Any) -> Callable[[Message], None]:
    def change(reply: Message) -> None:
        content = RecordDict(dict(reply.content))
        entries = {**reply.content[RECORD], **values}
        content[RECORD] = ConfigRecord({k: v for k, v in entries.items() if v is not None})
        reply.content = content

    return change


def _replace_codes(reply: Message, change: Callable[[Any], Any]) -> None:
    (name,) = [n for n, r in reply.content.items() if isinstance(r, ArrayRecord)]
    codes = change(np.array(decode_npy(reply.content[name]["codes"].data)))
    content = RecordDict(dict(reply.content))
    content[name] = ArrayRecord({"codes": Array(codes)})
    reply.content = content


@pytest.mark.parametrize(
    ("scheme", "change", "reason"),
    [
        *(
            (scheme, change, reason)
            for scheme in ("mspdq-plain", "mspdq-jopeq")
            for change, reason in (
                (cut, "shape"),
                (widen, "dtype"),
                (spill, "malformed"),
                (rename, "names"),
            )
        ),
        ("mspdq-plain", say(ends=[0.0, math.nan]), "malformed"),
        ("mspdq-plain", say(ends=[1.0, 0.0]), "malformed"),
        ("mspdq-plain", say(ends=[0.0, 1e200]), "malformed"),
        ("mspdq-plain", say(ends=[1e200, 1e200]), "range"),
        ("mspdq-plain", say(ends=[1.0]), "malformed"),
        ("mspdq-plain", say(ends=None), "malformed"),
        ("mspdq-plain", say(ends="x"), "malformed"),
        ("mspdq-plain", say(ends=["x", "y"]), "malformed"),
        ("mspdq-jopeq", say(means=[math.nan, 0.0]), "malformed"),
        ("mspdq-jopeq", say(stds=[math.inf, 0.0]), "malformed"),
        ("mspdq-jopeq", say(stds=[1.0, -1.0]), "malformed"),
        ("mspdq-jopeq", say(stds=[1e300, 1.0]), "malformed"),
        ("mspdq-jopeq", say(means=[0.0]), "malformed"),
        ("mspdq-jopeq", say(means=None), "malformed"),
    ],
)
def test_a_malformed_answer_is_refused_counted_and_left_out(
    scheme: str, change: Callable[[Message], None], reason: str
) -> None:
    strategy, client, _ = SCHEMES[scheme]

    def damage(reply: Message) -> None:
        if reply.content[RECORD]["client-id"] == "2":
            change(reply)

    # Eleven values of five bits leave one bit of the last byte.
    options = {"bits": 5, "experiment_id": "e", "seed": 1}
    result = run(make(strategy, **options), client, before=listening(damage))
    assert result.history[1]["refused"] == {reason: 1}
    assert result.history[1]["accumulated"] == 3

    def disown(reply: Message) -> None:
        if reply.content[RECORD]["client-id"] == "2":
            say(**{"client-id": "nobody"})(reply)

    without = run(make(strategy, **options), client, before=listening(disown))
    assert same(result.arrays, without.arrays)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: QuantizedFedAvg(bits=0), "bits = 0: expected an integer from 1 to 16"),
        (lambda: QuantizedFedAvg(bits=17), "bits = 17: expected an integer from 1 to 16"),
        (lambda: JoPEQFedAvg(bits=17), "bits = 17: expected an integer from 1 to 16"),
        (lambda: JoPEQFedAvg(epsilon="4"), "epsilon = '4': expected a finite number"),
        (lambda: JoPEQFedAvg(epsilon=100.0, bits=2), "bits = 2: expected more for epsilon = 100"),
        (lambda: make(NbAFL, **NBAFL, law="cauchy"), "law = 'cauchy': expected one of 'gaussian'"),
        (
            lambda: make(NbAFL, **NBAFL, clip="all"),
            "clip = 'all': expected one of 'model', 'update'",
        ),
        (
            lambda: make(NbAFL, **NBAFL, epsilon=0),
            "epsilon = 0: expected a finite number",
        ),
        (
            lambda: make(NbAFL, **NBAFL, delta=1.0),
            "delta = 1.0: expected a number strictly between 0 and 1",
        ),
        (
            lambda: make(NbAFL, **NBAFL, exposures=0),
            "exposures = 0: expected an integer of at least 1",
        ),
        (lambda: NbAFL(clipping_norm=0, smallest_data=1), "clipping_norm = 0.0: expected"),
        (lambda: NbAFL(clipping_norm=1, smallest_data=0), "smallest_data = 0: expected an integer"),
    ],
)
def test_bad_parameters_are_named(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        make()


QUESTION = {"experiment-id": "e", "round": 1, "request": 0, "summed": 0, "code-limit": 0}
ASKED: dict[str, dict[str, Any]] = {
    "mspdq-fedavg": {},
    "mspdq-ldp": {"clip": "model", "clipping-norm": 1.0, "law": "gaussian", "scale": 1.0},
    "mspdq-jopeq": {"epsilon": 4.0, "bits": 8, "dither": 1},
    "mspdq-plain": {"bits": 8},
}


def answer(scheme: str, tmp_path: Any, *, policy: str = "", **changes: Any) -> Any:
    """Have a client of a scheme answer, on a node with a policy."""
    (tmp_path / "policy.toml").write_text(policy)
    config = {
        "partition-id": 0,
        "privacy-state": str(tmp_path),
        "privacy-policy": str(tmp_path / "policy.toml"),
    }
    context = Context(
        run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={}, series_id=1
    )
    asked = {**ASKED[scheme], **changes}
    trained = asked.pop("trained", np.ones(3, np.float32))
    client = SCHEMES[scheme][1](None, context)
    return client.handle(
        "train",
        {"w": np.zeros(3, np.float32)},
        {**QUESTION, **asked},
        lambda _: Trained({"w": trained}, {}),
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_node_that_asks_for_a_protection_declines(scheme: str, tmp_path: Any) -> None:
    arrays, fields = answer(scheme, tmp_path, policy="min_sigma = 0.0")
    assert arrays
    assert "metrics" not in fields
    for policy in (
        "max_epsilon = 8.0",
        "min_noise_multiplier = 0.1",
        "min_sigma = 2.0",
        "units = ['user']",
        "units = ['record']",
        "schemes = ['udp']",
        "min_summed = 3",
    ):
        with pytest.raises(DeclinedError):
            answer(scheme, tmp_path, policy=policy)


def test_a_node_with_a_least_sigma_takes_nbafl_with_as_much(tmp_path: Any) -> None:
    assert answer("mspdq-ldp", tmp_path, policy="min_sigma = 1.0")[0]
    for scheme in ("mspdq-fedavg", "mspdq-plain", "mspdq-jopeq"):
        with pytest.raises(DeclinedError):
            answer(scheme, tmp_path, policy="min_sigma = 1.0")


@pytest.mark.parametrize(
    ("scheme", "changes", "error"),
    [
        ("mspdq-fedavg", {"keep-back": "w"}, ProtocolError),
        ("mspdq-fedavg", {"keep-back": ["v"]}, InvalidParameterError),
        ("mspdq-fedavg", {"keep-back": ["w"]}, InvalidParameterError),
        ("mspdq-plain", {"bits": 40}, InvalidParameterError),
        ("mspdq-plain", {"bits": None}, InvalidParameterError),
        ("mspdq-jopeq", {"dither": "1"}, ProtocolError),
        ("mspdq-jopeq", {"bits": 1.0}, ProtocolError),
        ("mspdq-ldp", {"scale": 0.0}, InvalidParameterError),
        ("mspdq-ldp", {"clipping-norm": -1.0}, InvalidParameterError),
        ("mspdq-ldp", {"law": "none"}, InvalidParameterError),
        *((scheme, {"trained": np.full(3, np.nan, np.float32)}, DataError) for scheme in SCHEMES),
        *((scheme, {"trained": np.ones(4, np.float32)}, ProtocolError) for scheme in SCHEMES),
    ],
)
def test_a_client_refuses_what_it_cannot_do(
    scheme: str, changes: dict[str, Any], error: type[FlwrPrivacyError], tmp_path: Any
) -> None:
    with pytest.raises(error):
        answer(scheme, tmp_path, **changes)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_none_of_them_claims_a_privacy_that_is_not_proven(scheme: str) -> None:
    strategy, _, options = SCHEMES[scheme]
    promise = strategy(**options).guarantee()
    assert promise.text().startswith(f"{scheme} protects nothing. Not protected: the ")
    assert (promise.epsilon, promise.delta, promise.spent) == (None, None, None)
