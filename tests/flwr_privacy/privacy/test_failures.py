"""The coordinate that says whether a training failed: what it adds to a release."""

import math
from typing import Any

import numpy as np
import pytest
from every_scheme import SHARES, UPDATE, with_
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flwr_privacy.accounting import spent
from flwr_privacy.central_dp import mean as central_mean
from flwr_privacy.central_dp.mean import ClippedUpdate
from flwr_privacy.errors import DataError, InvalidParameterError, ProtocolError
from flwr_privacy.pipeline.mechanism import Facts
from flwr_privacy.privacy.adaptive_clipping import COUNT_NAME
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.privacy.distributed_noise import summed_gap
from flwr_privacy.privacy.failures import FAILED_NAME, failed_code
from flwr_privacy.privacy.noise import discretisation_gap
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.udp import terms as udp_terms

START = {"w": np.zeros((2, 3)), "b": np.zeros(())}
OUTCOMES = st.one_of(
    st.none(),  # a training that fails
    st.fixed_dictionaries({"w": hnp.arrays(np.float64, (2, 3)), "b": hnp.arrays(np.float64, ())}),
)
NORMS = st.floats(1e-3, 1e3)
MECHANISMS: dict[str, Any] = {
    "udp": UPDATE,
    "udp, shares": with_(UPDATE, parties=3),
    "central-dp": with_(SHARES, count_share=0.0),
    "central-dp, adaptive": SHARES,
}


def codes_of(name: str, norm: float, outcome: Any) -> tuple[np.ndarray, float]:
    """Return what is noised, in units of the weights: the update and its further coordinate."""
    terms = MECHANISMS[name]
    terms = with_(terms, clipping_norm=norm, grid=math.frexp(norm)[1] - 12)
    mechanism = terms if name.startswith("udp") else ClippedUpdate(terms)
    try:
        measured = mechanism.measure(START, outcome or {})
    except (DataError, ProtocolError):
        measured = mechanism.failed(START)
    plan = with_(terms, gap=1e9)
    plan = (plan if name.startswith("udp") else ClippedUpdate(plan)).plan(START, Facts())
    with pytest.MonkeyPatch.context() as patch:
        for module in (udp_terms, central_mean):
            patch.setattr(module, "discrete_gaussian", lambda size, *_: np.zeros(size, np.int64))
        arrays, _ = mechanism.noise(measured, plan, SecureRandom.insecure(1))
    arrays.pop(COUNT_NAME, None)
    assert set(arrays) == {"w", "b", FAILED_NAME}
    code = int(arrays[FAILED_NAME][0])
    assert code == (failed_code(norm, 2.0**terms.grid) if measured.failed else 0)
    vector = np.concatenate([np.ravel(array).astype(float) for array in arrays.values()])
    return 2.0**terms.grid * vector, norm


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", MECHANISMS)
@settings(max_examples=60)
@given(norm=NORMS, one=OUTCOMES, other=OUTCOMES)
def test_update_and_count_are_within_the_norm_and_no_further_apart_than_is_charged(
    name: str, norm: float, one: Any, other: Any
) -> None:
    (first, _), (second, _) = codes_of(name, norm, one), codes_of(name, norm, other)
    for vector in (first, second):
        assert float((vector**2).sum()) <= norm**2  # one client more or less
        assert math.sqrt((vector**2).sum()) > norm * 0.99 or vector[-1] == 0
    assert np.linalg.norm(first - second) <= 2 * norm  # one client's data replaced
    if (first[-1] > 0) != (second[-1] > 0):
        assert np.linalg.norm(first - second) <= math.sqrt(2) * norm * (1 + 1e-12)


def test_a_grid_may_be_as_coarse_as_the_norm() -> None:
    assert failed_code(1.0, 1.0) == 1
    with pytest.raises(InvalidParameterError, match="a step of at most the clipping norm"):
        failed_code(0.999, 1.0)


def test_the_charge_is_that_of_the_update_alone() -> None:
    counted, plain = UPDATE, with_(UPDATE, count_failed=False)
    assert counted.charge() == plain.charge()
    plans = [terms.plan(START, Facts()) for terms in (counted, plain)]
    assert plans[0] == plans[1]
    assert spent([counted.charge()] * 3, delta=1e-5) == spent([plain.charge()] * 3, delta=1e-5)


@pytest.mark.parametrize("parties", [0, 3])
def test_the_codes_of_the_update_are_bit_for_bit_those_without_the_count(parties: int) -> None:
    trained = {"w": np.full((2, 3), 0.25), "b": np.array(0.5)}
    answers = []
    for terms in (with_(UPDATE, parties=parties), with_(UPDATE, parties=parties, count_failed=0)):
        measured, plan = terms.measure(START, trained), terms.plan(START, Facts())
        answers.append(terms.noise(measured, plan, SecureRandom.insecure(5)))
    (counted, own), (plain, same) = answers
    assert counted.pop(FAILED_NAME).dtype == (np.int64 if parties else np.int32)
    assert own == same
    assert {n: a.tolist() for n, a in counted.items()} == {n: a.tolist() for n, a in plain.items()}


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_so_are_those_of_central_dp(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = {"w": np.full((2, 3), 0.25), "b": np.array(0.5)}
    mechanism = ClippedUpdate(with_(SHARES, count_share=share))

    def answer() -> Any:
        measured = mechanism.measure(START, trained)
        plan = mechanism.plan(START, Facts())
        return mechanism.noise(measured, plan, SecureRandom.insecure(5))[0]

    counted = answer()
    del counted[FAILED_NAME]
    monkeypatch.setattr(type(SHARES), "failed_code", 0)
    plain = answer()
    assert {n: a.tolist() for n, a in counted.items()} == {n: a.tolist() for n, a in plain.items()}


def test_what_the_grid_costs_counts_one_coordinate_more() -> None:
    noise = UPDATE.noise_multiplier * 2 / 2.0**UPDATE.grid
    gap = discretisation_gap(8, noise)
    with_(UPDATE, gap=gap).plan(START, Facts())
    assert discretisation_gap(7, noise) < gap * 0.999
    with pytest.raises(InvalidParameterError, match="would be lost to it"):
        with_(UPDATE, gap=gap * 0.999).plan(START, Facts())
    with_(UPDATE, gap=gap * 0.999, count_failed=False).plan(START, Facts())
    alone = with_(SHARES, count_share=0.0)
    share = alone.share_sigmas()[0] / 2.0**alone.grid
    assert alone.grid_gap(7) == summed_gap(8, share, alone.parties)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"unit": "record"}, "count_failed = True: expected false where a record is protected"),
        ({"noise_multiplier": 0.0}, "count_failed = True: expected false"),
    ],
)
def test_what_has_a_refusal_of_its_own_counts_nothing(wrong: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        with_(UPDATE, **wrong)
    assert with_(SHARES, noise="server", parties=1).failed_code == 0


@pytest.mark.parametrize("terms", [UPDATE, SHARES])
def test_a_grid_without_room_and_a_name_that_is_taken_are_refused_before_data(terms: Any) -> None:
    def plan(terms: Any, model: Any) -> None:
        mechanism = terms if hasattr(terms, "plan") else ClippedUpdate(terms)
        mechanism.plan(model, Facts())

    with pytest.raises(InvalidParameterError, match=r"a step of at most the clipping norm"):
        plan(with_(terms, grid=1), START)
    with pytest.raises(InvalidParameterError, match="other names than this one"):
        plan(terms, {**START, FAILED_NAME: np.zeros(1)})


def test_failures_of_one_seed_after_the_other_are_noised_as_is_charged() -> None:
    """The noise of the coordinate over many answers, to five standard errors."""
    sigma, draws = UPDATE.failed_sigma(), []
    assert sigma == 2 * UPDATE.noise_multiplier
    plan = UPDATE.plan(START, Facts())
    for seed in range(1500):
        arrays, _ = UPDATE.noise(UPDATE.failed(START), plan, SecureRandom.insecure(seed))
        draws.append(float(arrays[FAILED_NAME][0]) / failed_code(1.0, 2.0**UPDATE.grid))
    noise = np.array(draws) - 1
    assert abs(noise.mean()) < 5 * sigma / math.sqrt(noise.size)
    assert abs((noise**2).mean() / sigma**2 - 1) < 5 * math.sqrt(2 / noise.size)


def test_who_claims_to_weigh_more_than_the_others_is_refused() -> None:
    """At user level everybody weighs 1, and the noise of the count is for that."""
    mean = UPDATE.accumulator(START)
    codes = {name: np.zeros(shape, dtype) for name, (shape, dtype) in mean.template.items()}
    for weight in (0, 2, 10**9):
        with pytest.raises(ReplyRefusedError, match="every client weighs 1"):
            mean.accumulate("a", codes, weight=weight)
    mean.accumulate("a", codes, weight=1)
