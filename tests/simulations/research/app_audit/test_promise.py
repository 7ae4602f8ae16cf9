"""Three planted lies are refuted, and promises that are kept are not."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from flwr_privacy.simulations.research.app_audit import promise as promise_module
from flwr_privacy.simulations.research.app_audit.findings import (
    CANNOT_TELL,
    NOT_REFUTED,
    NOTE,
    REFUTED,
    Finding,
)
from flwr_privacy.simulations.research.app_audit.processes import run_probe
from flwr_privacy.simulations.research.app_audit.promise.claims import Claim, read_claim
from flwr_privacy.simulations.research.app_audit.promise.verdicts import promise
from flwr_privacy.simulations.research.app_audit.target import Target
from flwr_privacy.simulations.research.app_audit.transcript import Transcript
from tests.simulations.research.app_audit.promise_apps import written

GALLERY = Path(__file__).parents[4] / "docs" / "gallery"

_LOCAL = "LocalDpMod(clipping_norm=1.0, sensitivity=2.0, epsilon=4.0, delta=1e-5)"
_TOTAL = 6.67  # of three rounds, rounded up
_WRAPPER = (
    "strategy = DifferentialPrivacyServerSideFixedClipping("
    "strategy, noise_multiplier=2.0, clipping_norm=1.0, num_sampled_clients=10)"
)
_MASKED = """
def mod(message, context, call_next):
    reply = call_next(message, context)
    if "arrays" not in reply.content:
        return reply
    masked = reply.content["arrays"]["w"].numpy()
    nodes = context.node_config["num-partitions"]
    me = context.node_config["partition-id"]
    for other in range(nodes):
        if other != me:
            shared = np.random.default_rng([min(me, other), max(me, other)])
            masked = masked + (1 if me < other else -1) * shared.normal(0, 1e3, masked.shape)
    # What a server that knows how many there are takes off again.
    step = 2.0**-20
    codes = np.round(masked / step).astype(np.int64)
    content = RecordDict({"metrics": reply.content["metrics"],
                          "masked": ConfigRecord({"codes": codes.tobytes()})})
    return Message(content, reply_to=message)
"""
_OPENED = """class Opened(FedAvg):
        def aggregate_train(self, server_round, replies):
            codes = [np.frombuffer(r.content["masked"]["codes"], np.int64) for r in replies]
            mean = sum(codes) * 2.0**-20 / len(codes)
            return ArrayRecord({"w": Array(mean)}), None
    strategy = Opened(min_train_nodes=1, min_available_nodes=1, min_evaluate_nodes=1)"""


@dataclass
class Audited:
    """An app, a run of it as it is, and a folder."""

    target: Target
    as_is: Transcript
    folder: Path

    def promise(self, claim: str = "", *, seconds: float = 120) -> dict[str, Finding]:
        findings = promise(
            self.target,
            self.as_is,
            claim=read_claim(claim) if claim else None,
            seconds=seconds,
            seed=1,
            folder=self.folder / f"canaries-{len(list(self.folder.iterdir()))}",
        )
        return {one.name: one for one in findings}


def audited(app: Path, folder: Path, *, clients: int = 10) -> Audited:
    target = Target.of(app, clients=clients)
    as_is = run_probe(target, folder / "runs" / "as-is", seconds=120, seed=1)
    assert as_is.about["ended"] == "whole", as_is.about["error"]
    return Audited(target, as_is, folder / "runs")


@pytest.fixture(autouse=True)
def few_coins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promise_module, "COINS", 100)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    folder = tmp_path_factory.mktemp("local")
    return audited(written(folder, "locally", mods=_LOCAL, evaluate=0.0), folder)


def test_noise_on_metrics_alone_is_refuted(tmp_path: Path) -> None:
    # The app draws a normal number for its loss: this is not noise on its arrays.
    found = audited(written(tmp_path, "metrics"), tmp_path).promise("epsilon=1,delta=1e-5")
    assert found["the promise"].verdict == found["updates without noise"].verdict == REFUTED
    assert found["the promise"].numbers["p"] < 1e-3  # by the coins as well
    assert found["the promise"].numbers["coins"] == 100


def test_a_secure_sum_of_one_client_is_refuted(tmp_path: Path) -> None:
    app = written(tmp_path, "lonely", mod=_MASKED, mods="mod", wrap=_OPENED)
    found = audited(app, tmp_path, clients=1).promise()
    assert found["a sum of one client"].verdict == REFUTED
    assert found["the promise"].verdict == NOTE


def test_an_epsilon_per_round_is_not_that_of_the_training(local: Audited) -> None:
    found = local.promise("epsilon=4,delta=1e-5", seconds=0.1)
    assert found["the claim and LocalDpMod"].verdict == found["the promise"].verdict == REFUTED
    assert found["the claim and LocalDpMod"].numbers["total"] == pytest.approx(_TOTAL, abs=0.01)


def test_the_total_of_local_noise_is_not_refuted(local: Audited) -> None:
    found = local.promise(f"epsilon={_TOTAL},delta=1e-5")
    assert found["the promise"].verdict == NOT_REFUTED
    assert 0 < found["the promise"].numbers["refutable below"] < _TOTAL
    assert found["the promise"].numbers["estimate"] > 1
    assert found["parameters of LocalDpMod"].verdict == NOTE
    assert REFUTED not in {one.verdict for one in found.values()}


def test_an_honest_wrapper_is_not_refuted(tmp_path: Path) -> None:
    found = audited(written(tmp_path, "central", wrap=_WRAPPER), tmp_path).promise()
    one = found["the promise"]
    assert one.verdict in (NOT_REFUTED, CANNOT_TELL)
    assert one.numbers["coins"] == 100 and one.numbers["claimed"] == pytest.approx(3.71, abs=0.01)
    assert REFUTED not in {one.verdict for one in found.values()}


def test_record_level_is_not_told_by_canary_clients(local: Audited) -> None:
    found = local.promise("epsilon=1,delta=1e-5,unit=record")
    assert found["the promise"].verdict == CANNOT_TELL
    assert "hide records" in found["the promise"].said


@pytest.mark.long
def test_noise_from_one_seed_is_refuted(tmp_path: Path) -> None:
    # Before each upload the seed is set again: noise of the right size, the same for all clients.
    mod = """
def mod(message, context, call_next):
    np.random.seed(7)
    return call_next(message, context)
"""
    seeded = "lambda m, c, n: (lambda r: (np.random.seed(7), r)[1])(n(m, c))"
    app = written(tmp_path, "seeded", mod=mod, mods=f"{_LOCAL}, {seeded}", evaluate=0.0)
    found = audited(app, tmp_path).promise(f"epsilon={_TOTAL},delta=1e-5")
    assert found["the promise"].verdict == REFUTED


@pytest.mark.long
def test_noise_on_canaries_alone_is_refuted(tmp_path: Path) -> None:
    mod = """
class OnlyLarge(LocalDpMod):
    def __call__(self, message, context, call_next):
        replies = []
        def watched(m, c):
            replies.append(call_next(m, c))
            return replies[-1]
        start = message.content["arrays"]["w"].numpy()
        noised = super().__call__(message, context, watched)
        return noised
class Fair(OnlyLarge):
    def __call__(self, message, context, call_next):
        start = message.content["arrays"]["w"].numpy()
        reply = call_next(message, context)
        if np.linalg.norm(reply.content["arrays"]["w"].numpy() - start) < 10:
            return reply
        return super().__call__(message, context, lambda m, c: reply)
"""
    app = written(
        tmp_path, "fair", mod=mod, mods=_LOCAL.replace("LocalDpMod", "Fair"), evaluate=0.0
    )
    found = audited(app, tmp_path).promise(f"epsilon={_TOTAL},delta=1e-5")
    assert found["updates without noise"].verdict == found["the promise"].verdict == REFUTED


@pytest.mark.long
def test_noise_of_the_apps_own_function_is_not_told(tmp_path: Path) -> None:
    noise = "weights = weights + np.random.normal(0, 5, weights.shape)"
    found = audited(written(tmp_path, "own", after=noise), tmp_path).promise("epsilon=1,delta=1e-5")
    assert found["the promise"].verdict == CANNOT_TELL
    assert "own function adds noise" in found["the promise"].said


@pytest.mark.long
@pytest.mark.parametrize("app", ["plain_cnn", "secagg", "local_dp", "shared_noise"])
def test_the_gallery_is_not_refuted(app: str, tmp_path: Path) -> None:
    found = audited(GALLERY / app, tmp_path).promise(seconds=300)
    assert REFUTED not in {one.verdict for one in found.values()}
    claims = app in ("local_dp", "shared_noise")
    assert (found["the promise"].verdict == NOTE) is not claims
    if claims:
        assert math.isfinite(found["the promise"].numbers["claimed"])


def test_a_round_and_a_training() -> None:
    once = Claim(epsilon=1.0, delta=1e-5, per="round")
    assert (once.over(3).epsilon, once.over(3).delta) == pytest.approx((3.0, 3e-5))
    gaussian = Claim(epsilon=4.377178, delta=1e-5, per="round", gaussian=True)
    assert gaussian.over(4).epsilon == pytest.approx(10.0, abs=0.5)  # mu 1 becomes mu 2
