"""One client under ACFL, asked directly: what it answers once, declines and refuses."""

import contextlib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acfl_app import (
    ALL_ALLOWED,
    FEATURES,
    LABELS,
    RECORDS,
    Node,
    data_of,
    gradient_terms,
    setup_terms,
)

from flwr_privacy.acfl.features import FourierFeatures
from flwr_privacy.acfl.terms import GradientTerms, SetupTerms
from flwr_privacy.clients import acfl_client_app
from flwr_privacy.clients.acfl import ACFLClient
from flwr_privacy.errors import (
    ChargedFailureError,
    DataError,
    DeclinedError,
    FlwrPrivacyError,
    InvalidParameterError,
    LedgerError,
    ProtocolError,
)
from flwr_privacy.privacy.ledger import Entry, LockedLedger
from flwr_privacy.wire.fields import write

X, Y = data_of(0)
W = np.linspace(-0.5, 0.5, FEATURES * LABELS).reshape(FEATURES, LABELS)
MODES = {
    "record": {"noise": "record", "epsilon": 20.0},
    "paper": {"noise": "variances", "sigma1_sq": 0.5, "sigma2_sq": 0.5},
    "none": {"noise": "none"},
}
TOGETHER = {"parties": 3}  # noise, or masks, of a sum with so many honest clients
SUMMED = {"summed": 3}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def same_answer(one: Any, other: Any) -> bool:
    assert one[1] == other[1]
    assert sorted(one[0]) == sorted(other[0])
    for name, array in one[0].items():
        np.testing.assert_array_equal(array, other[0][name])
    return True


# -- Answers that are given once -----------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_F22_a_second_setup_gets_the_same_bytes(mode: str, node: Node) -> None:
    """Without noise they are no secret that is kept, but what is exact is the same again."""
    terms = setup_terms(**MODES[mode])
    first = node.set_up(terms)
    again = node.set_up(terms, round=7, request=3)  # whatever the server counts
    assert same_answer(first, again)
    assert len(node.entries()) == (mode != "none")
    assert node.loaded == 1
    assert len(kept_files(node)) == (mode != "none")


@pytest.mark.parametrize("mode", ["record", "paper"])
def test_F22_a_second_setup_with_other_terms_is_declined(mode: str, node: Node) -> None:
    terms = setup_terms(**MODES[mode])
    node.set_up(terms)
    for change in ({"max_records": 19}, {"feature_bound": 0.99}, {"delta": 1e-6}):
        with pytest.raises(DeclinedError, match="answered before, with other terms"):
            node.set_up(replace(terms, **change))
    assert len(node.entries()) == 1
    assert node.loaded == 1


def test_an_exact_setup_is_the_same_whatever_else_was_asked(node: Node) -> None:
    terms = setup_terms(**MODES["none"])
    first = node.set_up(terms)
    for change in ({"max_records": 19}, {"feature_bound": 1.5}, {"delta": 1e-6}):
        assert same_answer(first, node.set_up(replace(terms, **change)))
    np.testing.assert_allclose(first[0]["features"], X.T @ X, rtol=1e-12)
    np.testing.assert_allclose(first[0]["labels"], X.T @ Y, rtol=1e-12)
    assert node.entries() == []


def kept_files(node: Node) -> list[Path]:
    return list((node.folder / "a.setups").rglob("*.reply"))


@pytest.mark.parametrize("mode", ["record", "paper"])
def test_F22_a_setup_in_a_sum_is_given_once(mode: str, node: Node) -> None:
    alone, summed = setup_terms(**MODES[mode]), setup_terms(**MODES[mode], **TOGETHER)
    node.set_up(summed, **SUMMED)
    with pytest.raises(DeclinedError, match="in a secure sum of its own"):
        node.set_up(summed, **SUMMED)
    with pytest.raises(DeclinedError, match="answered before, with other terms"):
        node.set_up(alone)
    node.set_up(alone, **{"experiment-id": "f"})
    with pytest.raises(DeclinedError, match="answered before"):
        node.set_up(summed, **SUMMED, **{"experiment-id": "f"})
    assert len(node.entries()) == 2


def test_an_exact_setup_in_a_sum_is_given_once_too(node: Node) -> None:
    """Alone it is given before and after: nothing protects what has no noise."""
    alone, summed = setup_terms(**MODES["none"]), setup_terms(**MODES["none"], **TOGETHER)
    first = node.set_up(alone)
    node.set_up(summed, **SUMMED)
    with pytest.raises(DeclinedError, match="in a secure sum of its own"):
        node.set_up(summed, **SUMMED)
    assert same_answer(first, node.set_up(alone))


def test_another_experiment_has_another_setup(node: Node) -> None:
    terms = setup_terms(**MODES["record"])
    first, _ = node.set_up(terms)
    second, _ = node.set_up(terms, **{"experiment-id": "f"})
    assert (first["features"] != second["features"]).all()
    assert len(node.entries()) == 2


def test_a_gradient_is_charged_once_and_repeated_as_it_was(node: Node) -> None:
    """The whole question counts: its round, its terms, and the model that comes with it."""
    terms = gradient_terms(**MODES["record"], alpha=0.0, clipping_norm=0.05)
    first = node.descend(terms)
    assert same_answer(first, node.descend(terms))
    assert len(node.entries()) == 1
    other = node.descend(terms, W)
    assert (other[0]["gradient"] != first[0]["gradient"]).any()
    assert len(node.entries()) == 2
    assert same_answer(first, node.descend(terms))
    assert same_answer(other, node.descend(terms, W))
    node.descend(terms, round=2)
    assert [entry.charge for entry in node.entries()] == [terms.charge()] * 3


@pytest.mark.parametrize("mode", ["paper", "none"])
def test_an_exact_gradient_is_that_of_the_data_whether_or_not_there_was_a_setup(
    mode: str, node: Node
) -> None:
    """A node whose files are lost goes on: it is the server that asks for a setup first."""
    arrays, _ = node.descend(gradient_terms(**MODES[mode]), W)
    np.testing.assert_allclose(arrays["gradient"], X.T @ (X @ W - Y), rtol=1e-12)
    np.testing.assert_allclose(arrays["size"], ((X.T @ (X @ W - Y)) ** 2).sum(), rtol=1e-12)


def test_the_budget_of_an_experiment_is_kept(node: Node) -> None:
    setup = setup_terms(**MODES["record"], rounds=3)
    gradient = gradient_terms(**MODES["record"], rounds=3)
    node.set_up(setup)
    for server_round in (1, 2, 3):
        node.descend(gradient, round=server_round)
    with pytest.raises(DeclinedError, match="the budget is spent: epsilon 20 of 20 after 4 rel"):
        node.descend(gradient, round=4)
    assert len(node.entries()) == 4


@pytest.mark.parametrize("mode", ["record", "paper"])
@pytest.mark.parametrize("loss", ["gone", "torn"])
def test_a_setup_whose_answer_is_lost_is_not_drawn_anew(mode: str, loss: str, node: Node) -> None:
    terms = setup_terms(**MODES[mode], rounds=50)  # the budget would allow another one
    node.set_up(terms)
    (kept,) = kept_files(node)
    kept.write_bytes(kept.read_bytes()[:100])
    if loss == "gone":
        kept.unlink()
    for _ in range(2):
        with pytest.raises(DeclinedError, match="answered before, and the answer is lost"):
            node.set_up(terms)
    assert len(node.entries()) == 1


@pytest.mark.parametrize("together", [{}, TOGETHER])
def test_nothing_is_kept_of_a_setup_that_cannot_be_charged(
    together: dict[str, int], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = setup_terms(**MODES["record"], **together)
    summed = SUMMED if together else {}

    def full(request_log: LockedLedger, entry: Entry) -> None:
        raise LedgerError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LockedLedger, "charge", full)
        with pytest.raises(LedgerError, match="no space left"):
            node.set_up(terms, **summed)
    assert kept_files(node) == []
    node.set_up(terms, **summed)
    assert (len(kept_files(node)), len(node.entries())) == (not together, 1)


# -- Mini-batches --------------------------------------------------------------------------------


def test_batches_are_drawn_for_a_round_and_their_mean_is_the_whole(node: Node) -> None:
    """Poisson samples: the variance is that of independent records, (1 - q) / q of each."""
    node.config["insecure-seed"] = 1
    rate, rounds = 0.3, 600
    terms = gradient_terms(**MODES["none"], alpha=0.0, batch_fraction=rate)
    drawn = [node.descend(terms, W, round=r)[0]["gradient"] / rate for r in range(1, rounds + 1)]
    each = X[:, :, None] * (X @ W - Y)[:, None, :]
    error = np.sqrt((1 - rate) / rate * (each**2).sum(axis=0) / rounds)
    off = np.abs(np.mean(drawn, axis=0) - each.sum(axis=0))
    assert (off < 4.5 * error).all()
    spread = np.std(drawn, axis=0) / (error * math.sqrt(rounds))
    assert (np.abs(spread - 1) < 0.2).all()
    assert same_answer(node.descend(terms, W, round=5), node.descend(terms, W, round=5))


def test_nothing_that_a_server_knows_tells_a_batch(tmp_path: Path) -> None:
    """Two nodes of one name and with the same data: of 12 records 2^12 batches can be drawn."""
    terms, drawn = gradient_terms(**MODES["none"], alpha=0.0, batch_fraction=0.5), []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        node = Node(tmp_path / name)
        drawn.append([node.descend(terms, W, round=r)[0]["gradient"] for r in range(1, 11)])
    assert sum(np.array_equal(a, b) for a, b in zip(*drawn, strict=True)) < 5


# -- What a node's operator allows ---------------------------------------------------------------

ALL = set(MODES)
POLICIES: dict[str, tuple[set[str], set[str]]] = {  # whose setup and whose gradient it allows
    'neighbours = ["add_remove"]\nmax_epsilon = 20.1': ({"record"}, {"record"}),
    'neighbours = ["add_remove"]\nmax_epsilon = 19': (set(), set()),
    # Without a word of the policy it is counted as for a replaced record.
    "max_epsilon = 52.7": ({"record"}, {"record"}),
    "max_epsilon = 52": (set(), set()),
    'neighbours = ["replace_one"]': (set(), set()),
    'units = ["record"]': ({"record"}, {"record"}),
    'units = ["user"]': (set(), set()),
    "min_noise_multiplier = 0.1": ({"record"}, {"record"}),
    "min_noise_multiplier = 50": (set(), set()),
    "min_sigma = 0.1": ({"record", "paper"}, {"record"}),
    "min_sigma = 1000": (set(), set()),
    'schemes = ["udp"]': (set(), set()),
    'schemes = ["acfl"]': ({"record", "paper"}, {"record"}),
    "": ({"record", "paper"}, {"record"}),
    ALL_ALLOWED: (ALL, ALL),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_a_node_with_a_policy_answers_what_that_allows(
    mode: str, policy: str, tmp_path: Path
) -> None:
    """All of a budget of 20 is in the setup, or in the one gradient."""
    setup = setup_terms(**MODES[mode], alpha=1.0)
    gradient = gradient_terms(**MODES[mode], alpha=0.0, rounds=1)
    for what, allowed in zip(("setup", "gradient"), POLICIES[policy], strict=True):
        folder = tmp_path / what
        folder.mkdir()
        node = Node(folder, policy=policy)
        with contextlib.nullcontext() if mode in allowed else pytest.raises(DeclinedError):
            _ = node.set_up(setup) if what == "setup" else node.descend(gradient)
        assert node.loaded == (mode in allowed)


def test_a_policy_declines_what_is_exact_whatever_the_setup_has(tmp_path: Path) -> None:
    """As printed only the setup has noise: enough of it for the setup, never for a gradient."""
    node = Node(tmp_path, policy="min_sigma = 0.1")
    terms = setup_terms(**MODES["paper"])
    with pytest.raises(DeclinedError, match=r"asks for sigma 0: .* min_sigma = 0\.1"):
        node.descend(gradient_terms(**MODES["paper"], alpha=0.0))
    assert min(terms.sigma_features, terms.sigma_labels) > 0.1
    node.set_up(terms)
    assert [entry.scheme for entry in node.entries()] == ["acfl-unproven"]
    strict = Node(tmp_path, policy="max_epsilon = 1000")
    with pytest.raises(DeclinedError, match="no budget"):
        strict.set_up(terms, **{"experiment-id": "f"})
    with pytest.raises(DeclinedError, match="whose cost is not proven"):
        strict.set_up(setup_terms(**MODES["record"]), **{"experiment-id": "f"})


# -- Shares of noise -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("summed", "text"), [(0, "outside of a secure sum"), (2, "this node counts on 2")]
)
def test_a_share_is_given_to_enough_others_only(
    mode: str, summed: int, text: str, node: Node
) -> None:
    for ask in (
        lambda: node.set_up(setup_terms(**MODES[mode], **TOGETHER), summed=summed),
        lambda: node.descend(gradient_terms(**MODES[mode], **TOGETHER, alpha=0.0), summed=summed),
    ):
        with pytest.raises(DeclinedError, match=text):
            ask()
    assert (node.loaded, node.entries()) == (0, [])


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_meant_for_a_sum_is_not_given_into_one(mode: str, node: Node) -> None:
    with pytest.raises(ProtocolError, match="no share of noise for a secure sum"):
        node.set_up(setup_terms(**MODES[mode]), **SUMMED)
    with pytest.raises(ProtocolError, match="no share of noise for a secure sum"):
        node.descend(gradient_terms(**MODES[mode], alpha=0.0), **SUMMED)
    small = {**SUMMED, "code-limit": 2**20}
    with pytest.raises(ProtocolError, match="the noise needs"):
        node.set_up(setup_terms(**MODES[mode], **TOGETHER), **small)
    assert (node.loaded, node.entries()) == (0, [])


@pytest.mark.parametrize("mode", MODES)
def test_a_deployed_node_without_pins_gives_no_share_of_noise(mode: str, node: Node) -> None:
    """Where there is no noise, what is in a sum of clients that are made up is exact anyway."""
    del node.config["privacy-pins"]
    setup = setup_terms(**MODES[mode], **TOGETHER)
    gradient = gradient_terms(**MODES[mode], **TOGETHER, alpha=0.0)
    for ask in (lambda: node.set_up(setup, **SUMMED), lambda: node.descend(gradient, **SUMMED)):
        declined = pytest.raises(DeclinedError, match="this node pins no keys")
        with contextlib.nullcontext() if mode == "none" else declined:
            ask()
    assert node.entries() == []


@pytest.mark.parametrize("what", ["setup", "gradient"])
@pytest.mark.parametrize("limit", ["min_noise_multiplier", "min_sigma"])
def test_the_policys_noise_is_that_which_a_sum_has_in_any_case(
    what: str, limit: str, tmp_path: Path
) -> None:
    """With one client of three certain a sum may have 0.58 of the noise that is asked for."""
    setup = setup_terms(**MODES["record"], **TOGETHER)
    gradient = gradient_terms(**MODES["record"], **TOGETHER, alpha=0.0)
    charge = (setup if what == "setup" else gradient).charge()
    assert charge is not None
    sigma = gradient.sigma
    if what == "setup":
        sigma = min(setup.sigma_features, setup.sigma_labels)
    asked = charge.noise_multiplier if limit == "min_noise_multiplier" else sigma
    node = Node(tmp_path, policy=f"{limit} = {0.9 * asked}")

    def ask(certain: int) -> None:
        place = {**SUMMED, "certain": certain}
        _ = node.set_up(setup, **place) if what == "setup" else node.descend(gradient, **place)

    with pytest.raises(DeclinedError, match=limit):
        ask(certain=1)
    assert (node.loaded, node.entries()) == (0, [])
    ask(certain=3)
    assert len(node.entries()) == 1


def test_a_gradient_in_a_sum_is_given_once(node: Node) -> None:
    terms = gradient_terms(**MODES["record"], **TOGETHER, alpha=0.0)
    node.descend(terms, summed=5)
    with pytest.raises(DeclinedError, match="in a secure sum of its own"):
        node.descend(terms, summed=5)
    assert len(node.entries()) == 1


def test_an_exact_gradient_beyond_its_bound_is_not_put_into_a_sum(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    terms = gradient_terms(**MODES["none"], **TOGETHER, alpha=0.0)
    low = replace(terms, gradient_bound=1e-3)
    with pytest.raises(DataError, match="the log of the node says how"):
        node.descend(low, **SUMMED)
    assert "a gradient has a value beyond the range of the secure sum" in caplog.text


# -- What does not fit ---------------------------------------------------------------------------

INFINITE = X.copy()
INFINITE[3, 1] = math.inf
HOT = np.eye(LABELS)[np.arange(RECORDS) % LABELS]


@pytest.mark.parametrize(
    ("data", "wish", "text"),
    [
        ((2 * X, Y), {}, "X = 'a value outside': expected entries from -1.0 to 1.0"),
        ((X, 2 * Y), {}, "Y = 'a value outside': expected entries from -1.0 to 1.0"),
        ((X, Y), {"feature_norm": 0.5}, "X = 'a row outside': expected rows of L2 norm at most"),
        ((X, Y), {"label_norm": 0.2}, "Y = 'a row outside'"),
        ((X, Y), {"one_hot": True}, "Y = 'another row': expected rows of zeros with a single 1"),
        ((X, HOT * 0), {"one_hot": True}, "Y = 'another row'"),
        ((INFINITE, Y), {}, "X = 'a value that is not finite'"),
        (X, {}, "the client's own data function failed"),
    ],
)
def test_what_a_server_could_learn_from_bounds_is_charged_and_asked_once(
    data: Any, wish: Any, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether values keep to bounds that a server names says something of them."""
    node = Node(tmp_path, data)
    with pytest.raises(ChargedFailureError, match="charged, and there is no answer: this node"):
        node.set_up(setup_terms(**MODES["record"], **wish))
    assert text in caplog.text  # in the log of the node
    for ask in (
        lambda: node.set_up(setup_terms(**MODES["record"])),
        lambda: node.descend(gradient_terms(**MODES["record"], alpha=0.0)),
    ):
        with pytest.raises(DeclinedError, match="nothing more of this experiment"):
            ask()
    assert len(node.entries()) == 1


@pytest.mark.parametrize(
    ("data", "wish", "text"),
    [
        ((X, Y[1:]), {}, "Y = 'another number of records': expected as many records as X has"),
        ((X, Y[:, 0]), {}, "Y = 'another kind of array'"),
        ((X[:0], Y[:0]), {}, "X = 'another kind of array'"),
        ((X.astype(str), Y), {}, "X = 'another kind of array'"),
        ((X[:, :2], Y), {}, "features, labels = (3, 2): expected the columns of this client's"),
        ((X, Y[:, :1]), {}, "features, labels = (3, 2): expected the columns of this client's"),
        ((X, Y), {"max_records": 11}, "max_records = 11: expected at least the records of every"),
    ],
)
def test_data_that_do_not_fit_are_refused_before_anything_is_charged(
    data: Any, wish: Any, text: str, tmp_path: Path
) -> None:
    node = Node(tmp_path, data)
    for ask in (
        lambda: node.set_up(setup_terms(**MODES["record"], **wish)),
        lambda: node.descend(gradient_terms(**MODES["record"], alpha=0.0, **wish)),
    ):
        with pytest.raises(FlwrPrivacyError) as error:
            ask()
        assert text in str(error.value)
    assert node.entries() == []


def test_what_is_beyond_a_bound_is_cut_if_the_client_says_so(tmp_path: Path) -> None:
    node = Node(tmp_path, (3 * X, 3 * Y), excess="clip")
    arrays, _ = node.set_up(setup_terms(**MODES["none"], feature_norm=1.2))
    cut = np.clip(3 * X, -1, 1)
    cut *= np.minimum(1, 1.2 / np.linalg.norm(cut, axis=1))[:, None]
    np.testing.assert_allclose(arrays["features"], cut.T @ cut, rtol=1e-12)
    np.testing.assert_allclose(arrays["labels"], cut.T @ np.clip(3 * Y, -1, 1), rtol=1e-12)
    with pytest.raises(InvalidParameterError, match="excess = 'scale': expected one of"):
        ACFLClient((X, Y), excess="scale")


def test_the_feature_map_must_be_the_one_that_is_asked_for(tmp_path: Path) -> None:
    embed = FourierFeatures(raw=FEATURES, features=4, width=1.0, seed=0)
    node = Node(tmp_path, (X, Y), features=embed)
    wish = {**MODES["none"], "features": 4, "feature_norm": embed.norm}
    for identity in ("raw", replace(embed, seed=1).identity, replace(embed, width=2.0).identity):
        with pytest.raises(InvalidParameterError, match="expected the feature map of this client"):
            node.set_up(setup_terms(**wish, data_features=identity))
    arrays, _ = node.set_up(setup_terms(**wish, data_features=embed.identity))
    np.testing.assert_allclose(arrays["features"], embed(X).T @ embed(X), rtol=1e-12)


def test_data_are_loaded_when_they_are_needed_and_not_before(tmp_path: Path) -> None:
    node = Node(tmp_path, policy="min_noise_multiplier = 100")
    with pytest.raises(DeclinedError):
        node.set_up(setup_terms(**MODES["record"]))
    assert node.loaded == 0

    def never(context: Any) -> Any:
        raise AssertionError

    acfl_client_app(never)


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        ({}, ProtocolError, "0 arrays were sent: expected one, the model"),
        ({"a": W, "b": W}, ProtocolError, "2 arrays were sent: expected one, the model"),
        ({"W": W[0]}, InvalidParameterError, "model = (2,): expected shape (3, 2)"),
        ({"W": W.T}, InvalidParameterError, "model = (2, 3): expected shape (3, 2)"),
        ({"W": W * np.nan}, ProtocolError, "the model that was sent has NaN or infinity"),
    ],
)
def test_a_model_that_is_none_is_refused(model: Any, error: Any, text: str, node: Node) -> None:
    terms = gradient_terms(**MODES["record"], alpha=0.0)
    with pytest.raises(error) as caught:
        node.ask("train", model, {**write(terms), "round": 1})
    assert text in str(caught.value)
    assert (node.loaded, node.entries()) == (0, [])


@pytest.mark.parametrize("value", ["0.5", math.nan, math.inf, -1.0, None, [0.5]])
def test_a_word_or_nan_for_a_number_is_refused(value: Any, node: Node) -> None:
    shared = ("epsilon", "delta", "gap", "feature-bound", "label-norm", "max-records", "parties")
    setup, gradient = setup_terms(**MODES["record"]), gradient_terms(**MODES["record"], alpha=0.0)
    for name in (*shared, "sigma-features", "sigma-labels", "grid"):
        assert name in write(setup)
        with pytest.raises(FlwrPrivacyError, match=re.sub("-", "[-_]", name)):
            node.set_up(setup, **{name: value})
    for name in (*shared, "noise-multiplier", "clipping-norm", "batch-fraction", "gradient-bound"):
        assert name in write(gradient)
        with pytest.raises(FlwrPrivacyError, match=re.sub("-", "[-_]", name)):
            node.descend(gradient, **{name: value})
    assert (node.loaded, node.entries()) == (0, [])


def test_a_grid_on_which_the_noise_does_less_than_its_charge_is_refused(node: Node) -> None:
    """Against a server that understates what the grid costs, or takes one that hides the noise."""
    setup, gradient = setup_terms(**MODES["record"]), gradient_terms(**MODES["record"], alpha=0.0)

    def ask(terms: SetupTerms | GradientTerms) -> Any:
        return node.set_up(terms) if isinstance(terms, SetupTerms) else node.descend(terms)

    for terms in (setup, gradient):
        for lie in ({"grid": 10}, {"gap": 0.0}, {"gap": 1e-30}):
            with pytest.raises(InvalidParameterError, match="fewer, or more noise"):
                ask(replace(terms, **lie))
        with pytest.raises(DeclinedError, match="the budget is spent"):
            ask(replace(terms, gap=20.0))
    assert (node.loaded, node.entries()) == (0, [])


def test_what_the_server_must_not_set_is_refused(node: Node) -> None:
    for key in ("privacy-state", "privacy-policy", "insecure-seed", "insecure_seed"):
        with pytest.raises(InvalidParameterError, match="no keys of the node's own"):
            node.set_up(setup_terms(**MODES["record"]), **{key: 1})
    assert node.entries() == []
