"""What an upload is, found by comparing it with the update before all mods."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from flwr_privacy.simulations.research.app_audit.uploads import described

from .conftest import Written

RNG = np.random.default_rng(7)
START = RNG.normal(size=5000).astype(np.float32)
UPDATE = (0.01 * RNG.normal(size=5000)).astype(np.float32)
LENGTH = float(np.linalg.norm(UPDATE))


@pytest.mark.parametrize(
    ("left", "kind", "scale", "sigma"),
    [
        (UPDATE, "plain", 1.0, 0.0),
        (0.25 * UPDATE, "clipped", 0.25, 0.0),
        (UPDATE + 0.02 * RNG.normal(size=5000), "noised", 1.0, 0.02),
        (0.5 * UPDATE + 0.005 * RNG.normal(size=5000), "noised", 0.5, 0.005),
        (np.round(UPDATE / 0.01) * 0.01, "coded", 1.0, 0.0),
        (RNG.normal(size=5000), "unlike the update", 1.0, 1.0),
    ],
)
def test_an_upload_of_arrays(
    left: np.ndarray, kind: str, scale: float, sigma: float, written: Written
) -> None:
    written.exchange(start=START, inner=START + UPDATE, left=(START + left).astype(np.float32))
    (exchange,) = written.done().exchanges
    found = described(exchange)
    assert found is not None
    assert found.kind == kind
    assert found.norm == pytest.approx(LENGTH, rel=1e-3)
    assert found.scale == pytest.approx(scale, abs=0.1)
    assert found.sigma == pytest.approx(sigma, rel=0.1, abs=1e-9)
    assert found.said


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (np.round(UPDATE * 1e6).astype(np.int64), "coded"),
        (np.round((START + UPDATE) * 1e6).astype(np.int64) + 4_000_000, "coded"),
        (np.round((UPDATE + 0.02 * RNG.normal(size=5000)) * 1e6).astype(np.int64), "noised"),
        (RNG.integers(0, 2**32, 5000), "unlike the update"),
    ],
)
def test_an_upload_of_codes(codes: np.ndarray, kind: str, written: Written) -> None:
    reply = RecordDict({"codes": ArrayRecord([codes])})
    written.exchange(start=START, inner=START + UPDATE, reply=reply)
    (exchange,) = written.done().exchanges
    found = described(exchange)
    assert found is not None
    assert found.kind == kind


@pytest.mark.parametrize(("random", "packed"), [(True, RNG.bytes(20_000)), (False, bytes(20_000))])
def test_an_upload_of_bytes(random: bool, packed: bytes, written: Written) -> None:
    reply = RecordDict({"arrays": ArrayRecord([np.frombuffer(packed, np.uint8)])})
    written.exchange(start=START, inner=START + UPDATE, reply=reply)
    (exchange,) = written.done().exchanges
    found = described(exchange)
    assert found is not None
    assert (found.kind, found.random) == ("packed", random)


def test_an_answer_without_arrays_is_no_upload(written: Written) -> None:
    written.exchange(inner=START, reply=RecordDict({"own": ConfigRecord({"key": b"x" * 32})}))
    (exchange,) = written.done().exchanges
    assert described(exchange) is None
