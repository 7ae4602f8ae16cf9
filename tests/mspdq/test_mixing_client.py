"""The client halves of MSP and MSPDQ, asked directly: what they refuse, what they keep and say."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import make, message_app, record, run_strategy
from flwr.app import Context, Message, RecordDict

from flwr_privacy.clients import MSPClient, MSPDQClient, SecureSumClient, Trained, as_mod
from flwr_privacy.coding.packing import unpack
from flwr_privacy.errors import DataError, DeclinedError, InvalidParameterError, ProtocolError
from flwr_privacy.mspdq import Codec, MSPTerms, decode_start
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import MSP, MSPDQ, FedAvg
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.message import RECORD

MODEL = {
    "w": np.arange(1, 7, dtype=np.float64).reshape(2, 3) / 7,
    "n": np.array(3),
    "b": np.array(0.5),
}
SENT = {"w": MODEL["w"], "b": MODEL["b"]}
MINE = {"flwr-privacy.mixing", "flwr-privacy.sub-states"}
"""Names under which a client keeps a learning round."""


def model_plus(moved: float) -> np.ndarray:
    """Return what is sent of the model, moved in every entry."""
    return np.append(MODEL["w"].reshape(-1), MODEL["b"]) + moved


def plus_one(start: Any) -> Trained:
    return Trained({n: a + np.asarray(1, a.dtype) for n, a in start.items()}, {"loss": 0.125})


class Node:
    """One client that keeps its state between questions."""

    def __init__(self, folder: Path, kind: type = MSPDQClient, **config: Any) -> None:
        self.kind = kind
        self.config = {"client-id": "ward-7", "privacy-state": str(folder), **config}
        self.state = RecordDict()

    def ask(
        self,
        phase: str,
        arrays: Any = None,
        train: Callable[[Any], Trained] = plus_one,
        **fields: Any,
    ) -> tuple[Any, Any]:
        context = Context(
            run_id=1, node_id=1, node_config=self.config, state=self.state, run_config={}
        )
        question = {
            "experiment-id": "e",
            "round": 1,
            "request": 0,
            "summed": 0,
            "code-limit": 0,
            **{key.replace("_", "-"): value for key, value in fields.items()},
        }
        arrays = (MODEL if phase == "train" else SENT) if arrays is None else arrays
        arrays, own = self.kind(None, context).handle(phase, arrays, question, train)
        return dict(arrays), own

    def train(self, terms: MSPTerms, **changes: Any) -> tuple[Any, Any]:
        return self.ask("train", **{**_fields(write(terms)), **changes})

    def kept(self) -> dict[str, Any]:
        """Return what the client keeps of a round."""
        return {
            f"{name}.{key}": value if not hasattr(value, "numpy") else value.numpy().tobytes()
            for name in MINE & set(self.state)
            for key, value in self.state[name].items()
        }


def _fields(record: Any) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in record.items()}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def plain(tmp_path: Path) -> Node:
    return Node(tmp_path, MSPClient)


PLAIN = MSPTerms(rounds=3)
OWN = MSPTerms(rounds=3, levels=16)
WIDTHS = MSPTerms(rounds=3, levels=16, interval="linf")
REFERENCE = MSPTerms(rounds=3, levels=16, start="reference", interval="linf")
FUSED = MSPTerms(rounds=3, levels=16, start="reference")
TABLE = {"drawn": ["ward-6", "ward-7"], "draws": [2, 2]}
GLOBAL = MSPTerms(rounds=3, levels=16, start="global", interval="bound")


def test_what_the_server_heard_is_what_was_sent_and_not_the_exact_sub_state(plain: Node) -> None:
    """Else the mean of all clients would not keep its course: the average is of what was sent."""
    model = {name: array.astype(np.float32) for name, array in SENT.items()}
    sent, _ = plain.ask("train", model, **_fields(write(PLAIN)))
    for step in range(2):
        states = plain.state["flwr-privacy.sub-states"]
        heard, visible = (states[name].numpy() for name in ("heard", "visible"))
        message = np.concatenate([array.reshape(-1) for array in sent.values()])
        assert (message.dtype, heard.dtype) == (np.float32, np.float64)
        np.testing.assert_array_equal(heard, message.astype(np.float64))
        assert (heard != visible).any()
        sent, _ = plain.ask("mix", model, step=step, request=step)


@pytest.mark.parametrize(("kind", "levels"), [(MSPClient, 0), (MSPDQClient, 16)])
def test_the_number_that_a_client_draws_is_one_for_a_round_and_nobody_is_told(
    tmp_path: Path, kind: type, levels: int
) -> None:
    terms = MSPTerms(rounds=3, levels=levels, m=3, m_mode="iid", gamma=0.2)
    found = set()
    for server_round in range(1, 21):
        node = Node(tmp_path, kind)
        _, own = node.train(terms, round=server_round)
        (drawn,) = {node.state["flwr-privacy.mixing"]["weight"]}
        told = [own]
        for step in range(2):
            told.append(node.ask("mix", step=step, request=step, round=server_round)[1])
            assert node.state["flwr-privacy.mixing"]["weight"] == drawn
        assert {key for fields in told for key in fields} <= {"ends", "saturated", "half-width"}
        found.add(drawn)
    assert found == {1, 2, 3}  # one of them is missing once in 1,100 times


# -- What does not follow ------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "terms"), [(MSPClient, PLAIN), (MSPDQClient, OWN)])
def test_a_mixing_step_is_taken_once_and_in_its_turn(
    kind: type, terms: MSPTerms, tmp_path: Path
) -> None:
    node = Node(tmp_path, kind)
    node.train(terms)
    node.ask("mix", step=0)
    node.ask("mix", step=1)
    before = node.kept()
    for step in (0, 1, 3, -1, 2.5, "2", None):
        text = rf"mixing step {step!r} does not follow this client's message 2: it was taken, or th"
        with pytest.raises(ProtocolError, match=text):
            node.ask("mix", **({} if step is None else {"step": step}))
    assert node.kept() == before
    node.ask("mix", step=2)


def test_an_old_message_is_refused_after_the_last_step(node: Node) -> None:
    node.train(OWN)
    for step in range(3):
        node.ask("mix", step=step)
    for step in range(4):
        with pytest.raises(ProtocolError, match="no sub-states of round 1: it did not train in it"):
            node.ask("mix", step=step)


@pytest.mark.parametrize("phase", ["mix", "sync"])
def test_nobody_mixes_without_having_trained(phase: str, node: Node) -> None:
    text = "this client has no sub-states of round 1: it did not train in it, or the round is over"
    with pytest.raises(ProtocolError, match=text):
        node.ask(phase, step=0)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"round": 2}, "no sub-states of round 2"),
        ({"experiment_id": "f"}, "no sub-states of round 1"),
    ],
)
def test_a_message_for_another_round_is_refused(node: Node, other: Any, text: str) -> None:
    for terms, phase in ((OWN, "mix"), (REFERENCE, "sync")):
        node.train(terms)
        before = node.kept()
        with pytest.raises(ProtocolError, match=text):
            node.ask(phase, step=0, **other)
        assert node.kept() == before


def test_the_common_start_comes_once_and_before_the_steps(node: Node) -> None:
    text = "the request does not follow the client's last message"
    for terms in (OWN, WIDTHS, GLOBAL):  # no common start, or one that it had with the question
        node.train(terms, **({"width": 2.0} if terms is GLOBAL else {}))
        with pytest.raises(ProtocolError, match=text):
            node.ask("sync")
    for terms in (REFERENCE, FUSED):
        node.train(terms)
        with pytest.raises(ProtocolError, match=text):
            node.ask("mix", step=0)
        node.ask("sync")
        with pytest.raises(ProtocolError, match=text):
            node.ask("sync")
        assert node.state["flwr-privacy.mixing"]["sent"] == int(terms is FUSED)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"w": np.ones(3)}, "an average of 3 values for a client with 7 of them"),
        ({**SENT, "more": np.ones(2)}, "an average of 9 values for a client with 7 of them"),
        ({}, "an average of 0 values for a client with 7 of them"),
        ({"w": np.ones(7, np.int64)}, "'w' is int64 of shape .7,., not floats"),
    ],
)
@pytest.mark.parametrize(("phase", "terms"), [("mix", OWN), ("sync", REFERENCE)])
def test_an_average_of_another_length_is_refused(
    node: Node, phase: str, terms: MSPTerms, arrays: Any, text: str
) -> None:
    node.train(terms)
    before = node.kept()
    with pytest.raises(ProtocolError, match=text):
        node.ask(phase, arrays, step=0)
    assert node.kept() == before


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_average_that_is_not_finite_is_refused(plain: Node, bad: float) -> None:
    plain.train(PLAIN)
    with pytest.raises(DataError, match="'w' has NaN or infinity"):
        plain.ask("mix", {**SENT, "w": np.full((2, 3), bad)}, step=0)


@pytest.mark.parametrize(
    ("width", "error", "text"),
    [
        (None, ProtocolError, "the request has no width of the intervals"),
        (2, ProtocolError, "the request has no width of the intervals"),
        ("1.0", ProtocolError, "the request has no width of the intervals"),
        (-1.0, InvalidParameterError, r"width = -1.0: expected 0, or a number from 2\*\*-100"),
        (1e-40, InvalidParameterError, "width = 1e-40: expected 0, or a number from"),
        (1e40, InvalidParameterError, "width = 1e.40: expected 0, or a number from"),
        (math.nan, InvalidParameterError, "width = nan: expected a finite number"),
        (math.inf, InvalidParameterError, "width = inf: expected a finite number"),
    ],
)
def test_a_width_must_be_one(node: Node, width: Any, error: type, text: str) -> None:
    given = {} if width is None else {"width": width}
    node.train(WIDTHS)
    before = node.kept()
    with pytest.raises(error, match=text):
        node.ask("mix", step=0, **given)
    assert node.kept() == before
    node.ask("mix", step=0, width=4.0)
    with pytest.raises(error, match=text):
        node.train(GLOBAL, **given)
    assert not node.kept()


# -- Terms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"levels": 1}, "levels = 1: expected 0, or at least 2"),
        ({"levels": 2**16 + 1}, "levels = 65537: expected an integer from 0 to 65536"),
        ({"levels": -1}, "levels = -1: expected an integer from 0 to 65536"),
        ({"rounds": -1}, "rounds = -1: expected an integer of at least 0"),
        ({"m": 0}, "m = 0: expected an integer of at least 1"),
        ({"kappa": 1.0}, "kappa = 1.0: expected a number between 0 and 1"),
        ({"kappa": math.nan}, "kappa = nan: expected a finite number"),
        ({"gamma": 0.9}, "gamma = 0.9: expected less than largest_stable"),
        ({"eps_s": 1.0}, "eps_s = 1.0: expected a number from 0 up to but not 1"),
        ({"split": "none"}, "split = 'none': expected one of"),
        ({"split": "gaussian", "scale": 0.0}, "scale = 0.0: expected a finite number"),
        ({"start": "mine"}, "start = 'mine': expected one of"),
        ({"interval": "mine"}, "interval = 'mine': expected one of"),
        ({"coupling": "mine"}, "coupling = 'mine': expected one of"),
        ({"mass": "mine"}, "mass = 'mine': expected one of"),
        ({"interval": "bound"}, "interval = 'bound': expected another one: it needs the glo"),
        ({"levels": 0, "start": "global"}, "start = 'global': expected 'independent' without qua"),
        ({"start": "global", "rounds": 0}, "mixing_rounds = 0: expected at least 1 from a global"),
        ({"keep_back": ["nonesuch"]}, r"keep_back = \['nonesuch'\]: expected names of the model"),
        ({"keep_back": ["w", "b"]}, "a model with floating-point weights that are not kept back"),
    ],
)
def test_bad_terms_are_named(node: Node, change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        node.train(OWN, **change)
    assert not node.kept()


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("kappa", 1),
        ("kappa", None),
        ("rounds", 3.0),
        ("rounds", True),
        ("levels", "16"),
        ("paper", 0),
        ("split", 3),
        ("keep_back", "w"),
        ("keep_back", [1]),
    ],
)
def test_malformed_terms_are_named(node: Node, entry: str, value: Any) -> None:
    name = entry.replace("_", "-")
    with pytest.raises(ProtocolError, match=f"the entry '{name}' of MSPTerms is no "):
        node.train(OWN, **{entry: value})
    assert not node.kept()


def test_terms_that_are_missing_are_named(node: Node) -> None:
    with pytest.raises(ProtocolError, match="the entry 'kappa' of MSPTerms is no "):
        node.ask("train")


def test_each_half_follows_its_own_scheme(node: Node, plain: Node) -> None:
    with pytest.raises(InvalidParameterError, match="levels = 16: expected 0: MSP does not quant"):
        plain.train(OWN)
    with pytest.raises(InvalidParameterError, match="levels = 0: expected at least 2"):
        node.train(PLAIN)
    assert not node.kept()
    assert not plain.kept()


@pytest.mark.parametrize(
    "terms",
    [
        OWN,
        REFERENCE,
        MSPTerms(levels=15, interval="fixed"),
        MSPTerms(levels=15, start="reference", interval="fixed"),
        MSPTerms(levels=15, start="global", interval="self"),
        MSPTerms(levels=15, start="global", interval="linf"),
        MSPTerms(levels=15, start="global", interval="paper"),
    ],
)
def test_under_a_secure_sum_nothing_of_a_single_client_is_asked(
    node: Node, terms: MSPTerms
) -> None:
    text = f"start '{terms.start}' and interval '{terms.interval}' under a secure sum: they would"
    with pytest.raises(ProtocolError, match=text):
        node.train(terms, summed=3, width=2.0)
    assert not node.kept()


@pytest.mark.parametrize(
    ("drawn", "draws"),
    [
        (["ward-6", "ward-7"], [1, 0]),
        (["ward-6", "ward-7"], [1.0, 1]),
        (["ward-6", "ward-7"], [1, True]),
        (["ward-6", "ward-7"], [1]),
        (["ward-7", "ward-6"], [1, 1]),
        (["ward-5", "ward-6"], [1, 1]),
        ("ward-7", [1]),
        (["ward-7"], []),
    ],
)
def test_under_a_secure_sum_a_client_checks_how_often_it_was_drawn(
    node: Node, drawn: Any, draws: Any
) -> None:
    with pytest.raises(ProtocolError, match="table of draws is malformed, or does not have this"):
        node.train(GLOBAL, summed=3, width=2.0, drawn=drawn, draws=draws)


def test_under_a_secure_sum_nobody_may_outweigh_the_others(node: Node) -> None:
    with pytest.raises(ProtocolError, match="a client was drawn so often that it may weigh more"):
        node.train(
            GLOBAL, summed=3, width=2.0, drawn=["ward-1", "ward-2", "ward-7"], draws=[1, 1, 3]
        )
    node.train(GLOBAL, summed=3, width=2.0, drawn=["ward-1", "ward-2", "ward-7"], draws=[1, 1, 2])


def test_under_a_secure_sum_it_gives_centred_codes_and_its_weight_and_nothing_else(
    node: Node,
) -> None:
    arrays, own = node.train(
        MSPTerms(levels=15, start="global", interval="bound"), summed=3, width=8.0, **TABLE
    )
    assert own == {"metrics": {"num-examples": 2}}
    assert set(arrays) == {"codes"}
    assert arrays["codes"].dtype == np.int32
    # The first step moves every entry by 0.6, which is 1.05 knobs.
    assert set(arrays["codes"]) <= {1, 2}
    arrays, own = node.ask("mix", step=1, width=4.0, summed=3, **TABLE)
    assert own == {"metrics": {"num-examples": 2}}


@pytest.mark.parametrize("kind", [MSPClient, MSPDQClient])
def test_a_policy_that_wants_sums_declines_what_is_none(kind: type, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("min_summed = 3\n")
    options = {"privacy-policy": str(policy)}
    nodes = [{"client-id": name, "partition-id": i, **options} for i, name in enumerate("abcd")]
    strategy = MSP if kind is MSPClient else MSPDQ
    app = message_app([as_mod(kind)])
    result = run_strategy(strategy(mixing_rounds=1), app, nodes=nodes, num_rounds=1)
    assert result.history[1]["refused"] == {"declined": 4}
    if kind is MSPDQClient:
        options = {"secure_sum": SecureSum(threshold=3), "bound": 4.0}
        result = run_strategy(make(MSPDQ, **options), app, nodes=nodes, num_rounds=1)
        assert result.history[1]["refused"] == {}
        assert result.history[1]["accumulated"] == 4


@pytest.mark.parametrize(
    "rule",
    ["max_epsilon = 9.0", 'units = ["user"]', "min_noise_multiplier = 0.1", 'schemes = ["udp"]'],
)
def test_a_policy_with_a_budget_declines_sums_too(rule: str, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(rule)
    options = {"privacy-policy": str(policy)}
    nodes = [{"client-id": name, "partition-id": i} for i, name in enumerate("abcd")]
    nodes[2] |= options
    summed = SecureSum(threshold=3)
    for strategy, client in (
        (MSPDQ(secure_sum=summed, bound=4.0), MSPDQClient),
        (FedAvg(secure_sum=summed), SecureSumClient),
    ):
        app = message_app([as_mod(client)])
        line = run_strategy(strategy, app, nodes=nodes, num_rounds=1).history[1]
        assert (line["refused"], line["accumulated"]) == ({"declined": 1}, 3)


def test_the_policy_is_asked_before_every_message(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("")
    node = Node(tmp_path, MSPClient, **{"privacy-policy": str(policy)})
    node.train(PLAIN)
    policy.write_text("min_summed = 3\n")
    with pytest.raises(DeclinedError, match=r"outside of a secure sum .* min_summed = 3"):
        node.ask("mix", step=0)


# -- The state -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("terms", [PLAIN, OWN, REFERENCE, GLOBAL])
def test_a_model_that_is_not_finite_is_refused_and_nothing_is_kept(
    tmp_path: Path, terms: MSPTerms, bad: float
) -> None:
    node = Node(tmp_path, MSPDQClient if terms.levels else MSPClient)

    def broken(start: Any) -> Trained:
        return Trained({**plus_one(start).arrays, "b": np.array(bad)}, {})

    node.train(terms, width=2.0)
    assert node.kept()
    with pytest.raises(DataError, match="'b' has NaN or infinity: it is not released"):
        node.train(terms, train=broken, width=2.0)
    assert not node.kept()


def test_a_training_of_another_form_is_refused_and_nothing_is_kept(node: Node) -> None:
    def other(start: Any) -> Trained:
        return Trained({"w": np.ones(5)}, {})

    with pytest.raises(ProtocolError, match=r"'w' is float64 of shape \(5,\), not floats of shape"):
        node.train(OWN, train=other)
    assert not node.kept()


@pytest.mark.parametrize(
    "terms", [PLAIN, OWN, WIDTHS, REFERENCE, FUSED, GLOBAL, MSPTerms(levels=16, rounds=0)]
)
def test_the_state_is_gone_after_the_last_message(tmp_path: Path, terms: MSPTerms) -> None:
    node = Node(tmp_path, MSPDQClient if terms.levels else MSPClient)
    asked = ["train", *["sync"] * (terms.start == "reference")]
    asked += ["mix"] * (terms.rounds - terms.leaps)
    node.state["theirs"] = record({"kept": np.ones(1)})
    for number, phase in enumerate(asked):
        assert bool(node.kept()) == (number > 0)
        if phase == "train":
            node.train(terms, width=2.0)
        else:
            node.ask(phase, step=number - len(asked) + terms.rounds, width=2.0)
    # K = 0: there is nothing to mix, and no message after which to forget.
    assert not node.kept() or terms.rounds == 0
    assert "theirs" in node.state


def test_a_new_training_replaces_the_state(plain: Node) -> None:
    plain.train(PLAIN)
    plain.ask("mix", step=0)

    def plus_two(start: Any) -> Trained:
        return Trained({n: a + np.asarray(2, a.dtype) for n, a in start.items()}, {})

    second, _ = plain.train(PLAIN, train=plus_two, round=2)
    states = plain.state["flwr-privacy.sub-states"]
    visible, hidden = states["visible"].numpy(), states["hidden"].numpy()
    np.testing.assert_array_equal(visible, np.append(second["w"].reshape(-1), second["b"]))
    np.testing.assert_allclose(visible + hidden, 2 * model_plus(2), rtol=1e-12)
    with pytest.raises(ProtocolError, match="no sub-states of round 1"):
        plain.ask("mix", step=1)
    plain.ask("mix", step=0, round=2)


# -- What is said --------------------------------------------------------------------------------


def test_F4_the_steps_of_msp_are_the_equations(plain: Node) -> None:
    visible, own = plain.train(PLAIN)
    assert own == {}
    assert set(visible) == set(SENT)  # not the integers
    v = np.append(visible["w"].reshape(-1), visible["b"])
    h = 2 * model_plus(1) - v
    average = model_plus(0)
    for step in range(3):
        v, h = v + 0.5 * (average - v) + 0.3 * (h - v), h + 0.3 * (v - h)
        said, own = plain.ask("mix", step=step)
        np.testing.assert_allclose(said["w"].reshape(-1), v[:6], rtol=1e-12)
        np.testing.assert_allclose(said["b"], v[6], rtol=1e-12)
        assert said["b"].shape == ()
        assert own == {}


@pytest.mark.parametrize(
    ("terms", "entries"),
    [
        (OWN, [{"ends"}, *[{"saturated", "half-width"}] * 3]),
        (WIDTHS, [{"ends", "scalar"}, *[{"saturated", "scalar"}] * 3]),
        (REFERENCE, [set(), {"scalar"}, *[{"saturated", "scalar"}] * 3]),
        (FUSED, [set(), *[{"saturated", "half-width"}] * 3]),
        (GLOBAL, [{"saturated"}] * 3),
        (
            MSPTerms(rounds=2, levels=16, start="global", interval="paper"),
            [{"scalar"}, *[{"saturated", "scalar"}] * 2],
        ),
    ],
)
def test_nothing_is_said_but_codes_and_what_the_rule_asks(
    node: Node, terms: MSPTerms, entries: list[set[str]]
) -> None:
    """Neither sub-states nor the model nor metrics of the training."""
    asked = ["train", *["sync"] * (terms.start == "reference")]
    asked += ["mix"] * (terms.rounds - terms.leaps)
    assert len(asked) == len(entries)
    for number, (phase, expected) in enumerate(zip(asked, entries, strict=True)):
        if phase == "train":
            arrays, own = node.train(terms, width=2.0)
        else:
            step = number - len(asked) + terms.rounds
            arrays, own = node.ask(phase, step=step, width=2.0)
        assert set(own) == expected
        assert set(arrays) <= {"codes"}
        if "codes" in arrays:
            assert arrays["codes"].dtype == np.uint8
            assert arrays["codes"].shape == (4,)  # 7 values of 4 bits
        assert all(type(value) in (int, float, list) for value in own.values())


def test_only_the_client_that_is_asked_for_it_gives_the_reference(node: Node) -> None:
    assert node.train(REFERENCE) == ({}, {})
    arrays, own = node.train(REFERENCE, refers=True)
    assert set(arrays) == {"codes"}
    low, high = own["ends"]
    value = decode_start(unpack(arrays["codes"], 4, 7), (low, high), 16)
    model = model_plus(1)
    assert (value > 0.3 * model - (high - low) / 15).all()
    assert (value < 1.7 * model + (high - low) / 15).all()


def test_the_scalar_is_the_gap_of_the_sub_states_rounded_up(node: Node) -> None:
    """From the global start the gap is twice the update, which is 1 in each of 7 entries."""
    for rule, expected in (("linf", 2.0), ("paper", 2 * math.sqrt(7))):
        _, own = node.train(MSPTerms(levels=16, start="global", interval=rule))
        assert own["scalar"] == pytest.approx(expected, rel=2e-7)
        assert own["scalar"] >= expected * (1 - 1e-15)
        assert float(np.float32(own["scalar"])) == own["scalar"]


def test_a_client_that_is_asked_for_message_1_at_once_starts_from_the_model_it_got(
    node: Node,
) -> None:
    arrays, own = node.train(MSPTerms(levels=2**16, start="global", gamma=0.5, rounds=2))
    codec = Codec(model_plus(0), 2**16)
    codec.decode(unpack(arrays["codes"], 16, 7), 2 * own["half-width"])
    np.testing.assert_allclose(codec.value, model_plus(1), atol=1e-4)
    assert own["half-width"] == pytest.approx(1.0, rel=1e-6)


def test_no_reply_of_a_training_carries_what_the_client_keeps() -> None:
    kept: list[bytes] = []
    said: list[RecordDict] = []

    class Watched(MSPDQClient):
        def handle(self, *question: Any) -> Any:
            reply = super().handle(*question)
            states = self.context.state.get("flwr-privacy.sub-states", {})
            kept.extend(array.numpy().tobytes() for array in states.values())
            return reply

    def listen(grid: Any) -> None:
        pull = grid.pull_messages

        def pull_messages(ids: list[str]) -> Any:
            replies = list(pull(ids))
            said.extend(reply.content for reply in replies)
            return replies

        grid.pull_messages = pull_messages

    app = message_app([as_mod(Watched)])
    strategy = MSPDQ(mixing_rounds=2)
    run_strategy(strategy, app, num_rounds=1, before=listen, arrays=record(SENT))
    assert len(kept) == 4 * 2 * 3
    assert len(said) == 4 * 4  # with the hello
    for content in said:
        assert set(content) <= {"arrays", "metrics", RECORD}
        assert dict(content.get("metrics", {})) == {}
        octets = b"".join(
            array.data for r in content.array_records.values() for array in r.values()
        )
        assert not any(secret[:8] in octets for secret in kept)


def test_a_bare_message_reaches_no_training() -> None:
    from flwr_privacy.simulations.engines.inline import InlineGrid
    from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server

    for kind in (MSPClient, MSPDQClient):
        grid = InlineGrid(message_app([as_mod(kind)]), 1)
        with acting_as_server(grid.run_id):
            (node,) = grid.get_node_ids()
            message = Message(RecordDict({"arrays": record(SENT)}), node, "train")
            (reply,) = grid.send_and_receive([message], timeout=5)
        assert f"works under the scheme '{kind.scheme}' only" in reply.error.reason
