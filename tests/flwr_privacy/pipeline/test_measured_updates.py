"""What mechanisms make of whatever a user's code returns: within the plan, or refused.

The trainers check the single records: `tests/clients/torch/test_per_record*`.
"""

from typing import Any

import numpy as np
import pytest
from every_scheme import DEVICE, LOSS, SHARES, UPDATE, with_
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flwr_privacy.acfl.encoding import check_data
from flwr_privacy.acfl.release import CodedGradient, LocalCodedData
from flwr_privacy.acfl.terms import GradientTerms, SetupTerms
from flwr_privacy.central_dp.mean import ClippedUpdate
from flwr_privacy.clients.acfl_data import PreparedData
from flwr_privacy.errors import DataError, InvalidParameterError, ProtocolError
from flwr_privacy.m2fdp.release import DeviceUpdate
from flwr_privacy.pipeline.mechanism import Facts
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid
from flwr_privacy.privacy.randomness import SecureRandom

MECHANISMS: dict[str, Any] = {
    "udp": UPDATE,
    "udp, shares": with_(UPDATE, parties=3),
    "udp, bare": with_(UPDATE, noise_multiplier=0.0, count_failed=False),
    "central-dp": ClippedUpdate(SHARES),
    "central-dp, server": ClippedUpdate(with_(SHARES, noise="server", parties=1)),
    "m2fdp": DeviceUpdate(DEVICE, {}),
}
NORMS = {"udp": 1.0, "central-dp": 1.0, "m2fdp": 0.5}
SHAPES = {"w": (2, 3), "b": ()}
NUMBERS = (np.float16, np.float32, np.float64)
OTHERS = (np.int64, np.uint8, np.bool_, np.complex128, np.dtype("U3"), np.dtype("M8[s]"))


def finite(shape: Any, dtype: Any) -> st.SearchStrategy[Any]:
    return hnp.arrays(dtype, shape, elements={"allow_nan": False, "allow_infinity": False})


STARTS = st.fixed_dictionaries(
    {"w": finite(SHAPES["w"], np.float32), "b": finite(SHAPES["b"], np.float64)}
)
ANY_SHAPE = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
ANYTHING = st.one_of(
    *(hnp.arrays(kind, shape) for kind in NUMBERS for shape in SHAPES.values()),
    *(hnp.arrays(kind, ANY_SHAPE) for kind in (*NUMBERS, *OTHERS)),
)
OUTCOMES = st.one_of(
    st.fixed_dictionaries({name: hnp.arrays(np.float64, shape) for name, shape in SHAPES.items()}),
    st.fixed_dictionaries({"w": finite(SHAPES["w"], np.float32), "b": ANYTHING}),
    st.dictionaries(st.sampled_from(["w", "b", "other"]), ANYTHING),
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", MECHANISMS)
@settings(max_examples=80)
@given(start=STARTS, outcome=OUTCOMES)
def test_an_update_is_within_its_norm_and_its_codes(
    name: str, start: dict[str, Any], outcome: dict[str, Any]
) -> None:
    mechanism = MECHANISMS[name]
    plan = mechanism.plan(start, Facts())
    try:
        measured = mechanism.measure(start, outcome)
    except (DataError, ProtocolError):
        measured = mechanism.failed(start)
    update = getattr(measured, "update", measured)
    norm, vector = NORMS[name.partition(",")[0]], update.vector
    if name == "central-dp":  # its codes have taken the vector's place
        vector = measured.codes * CodeGrid(SHARES.grid).step
    assert float(np.linalg.norm(vector)) <= norm
    arrays, own = mechanism.noise(measured, plan, SecureRandom.insecure(3))
    assert {"w", "b"} <= set(arrays)
    for key, shape in SHAPES.items():
        assert arrays[key].shape == shape
        assert np.issubdtype(arrays[key].dtype, np.integer)
        assert np.abs(arrays[key]).max() <= min(plan.largest_code or CODE_LIMIT, CODE_LIMIT)
    assert set(own["metrics"]) <= {"num-examples", "sigma"}
    assert own["metrics"]["num-examples"] == 1


NUMBER_LIKE = st.one_of(
    *(
        st.floats(),
        st.integers(),
        st.booleans(),
        st.none(),
        st.text(max_size=2),
        st.complex_numbers(),
    ),
    hnp.arrays(np.float64, st.just(())).map(lambda array: array[()]),
    hnp.arrays(np.float32, ANY_SHAPE),
    st.just(10**400),
)


@pytest.mark.parametrize("noise_multiplier", [5.0, 0.0])
@settings(max_examples=150)
@given(outcome=st.dictionaries(st.sampled_from(["loss", "eval_loss", "accuracy"]), NUMBER_LIKE))
def test_a_loss_is_between_zero_and_its_cap(
    noise_multiplier: float, outcome: dict[str, Any]
) -> None:
    terms = with_(LOSS, noise_multiplier=noise_multiplier)
    try:
        measured = terms.measure({}, outcome)
    except ProtocolError:
        measured = terms.failed({})
    assert 0 <= measured.loss <= terms.cap
    _, own = terms.noise(measured, terms.plan({}, Facts()), SecureRandom.insecure(3))
    assert np.isfinite(own["metrics"]["loss"])
    assert own["metrics"]["num-examples"] == 1


BOUNDS = {
    "noise": "record",
    "features": 3,
    "labels": 2,
    "feature_map": "raw",
    "feature_bound": 1.0,
    "label_bound": 2.0,
    "feature_norm": 1.5,
    "label_norm": 2.5,
    "one_hot": False,
    "max_records": 5,
    "epsilon": 8.0,
    "delta": 1e-5,
    "gap": 1e-3,
    "parties": 0,
    "grid": -18,
}
SETUP = SetupTerms(
    **BOUNDS, encoding="moments", symmetric=False, sigma_features=20.0, sigma_labels=20.0
)
GRADIENT = GradientTerms(
    **BOUNDS, noise_multiplier=5.0, clipping_norm=0.5, batch_fraction=1.0, gradient_bound=0.0
)
TABLES = st.tuples(
    hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.just(3))),
    hnp.arrays(np.float64, (5, 2)),
).map(lambda pair: (pair[0], pair[1][: len(pair[0])]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("excess", ["refuse", "clip"])
@settings(max_examples=100)
@given(data=TABLES, model=finite((3, 2), np.float32))
def test_tables_that_are_taken_are_within_what_they_may_move(
    excess: str, data: Any, model: Any
) -> None:
    try:
        tables = PreparedData(
            *check_data(
                *data,
                feature_bound=SETUP.feature_bound,
                label_bound=SETUP.label_bound,
                feature_norm=SETUP.feature_norm,
                label_norm=SETUP.label_norm,
                excess=excess,
            )
        )
    except InvalidParameterError:
        return
    count, random = len(tables.features), SecureRandom.insecure(3)
    coded = LocalCodedData(SETUP)
    moments = coded.measure({}, tables)
    assert np.linalg.norm(moments.features) <= count * SETUP.feature_norm**2 * (1 + 1e-9)
    bound = count * SETUP.feature_norm * SETUP.label_norm
    assert np.linalg.norm(moments.labels) <= bound * (1 + 1e-9)
    answers = [coded.noise(moments, coded.plan({}, Facts()), random)]
    release = CodedGradient(GRADIENT)
    try:
        plan = release.plan({"W": model}, Facts())
    except InvalidParameterError:  # a model so large that rounding would show
        plan = None
    if plan is not None:
        measured = release.measure({"W": model}, tables)
        norm = count * GRADIENT.clipping_norm * (1 + 1e-3)
        assert np.linalg.norm(measured.gradient) <= norm
        answers.append(release.noise(measured, plan, random))
    for arrays, _ in answers:
        for array in arrays.values():
            assert array.dtype == np.int32
            assert np.abs(array.astype(np.int64)).max() <= CODE_LIMIT
    assert SETUP.reach() <= CodeGrid(SETUP.grid).step * CODE_LIMIT
