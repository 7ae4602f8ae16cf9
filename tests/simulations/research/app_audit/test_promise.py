"""Three planted lies are refuted, and promises that are kept are not."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from flwr_privacy.accounting.gaussian import epsilon_of, mu_of
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.app_audit.findings import (
    CANNOT_TELL,
    NOT_REFUTED,
    NOTE,
    REFUTED,
    Finding,
)
from flwr_privacy.simulations.research.app_audit.processes import run_probe
from flwr_privacy.simulations.research.app_audit.promise import played
from flwr_privacy.simulations.research.app_audit.promise.canary_runs import (
    CanaryRun,
    Scores,
    repeated_noise,
    server_scores,
)
from flwr_privacy.simulations.research.app_audit.promise.canary_tests import coin_tests
from flwr_privacy.simulations.research.app_audit.promise.claims import Claim, read_claim
from flwr_privacy.simulations.research.app_audit.promise.verdicts import promise
from flwr_privacy.simulations.research.app_audit.target import Target
from flwr_privacy.simulations.research.app_audit.transcript import Transcript
from flwr_privacy.simulations.research.audits.verdicts import holm
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
    monkeypatch.setattr(played, "COINS", 100)


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
    assert one.numbers["coins"] == 100
    assert one.numbers["claimed"] == pytest.approx(3.71, abs=0.01)
    assert REFUTED not in {one.verdict for one in found.values()}


def test_record_level_is_not_told_by_canary_clients(local: Audited) -> None:
    found = local.promise("epsilon=1,delta=1e-5,unit=record")
    assert found["the promise"].verdict == CANNOT_TELL
    assert "no training made a DataLoader" in found["the promise"].said


@pytest.mark.long
def test_noise_from_one_seed_is_refuted(tmp_path: Path) -> None:
    mod = """
def seeded(message, context, call_next):
    reply = call_next(message, context)
    np.random.seed(7)  # before the noise: it has the right size and is the same for all clients
    return reply
"""
    app = written(tmp_path, "seeded", mod=mod, mods=f"{_LOCAL}, seeded", evaluate=0.0)
    found = audited(app, tmp_path).promise(f"epsilon={_TOTAL},delta=1e-5")
    assert found["the promise"].verdict == REFUTED
    assert found["the promise"].numbers["p"] < 1e-6


@pytest.mark.long
def test_noise_on_canaries_alone_is_refuted(tmp_path: Path) -> None:
    mod = """
class Fair(LocalDpMod):
    def __call__(self, message, context, call_next):
        start = message.content["arrays"]["w"].numpy()
        reply = call_next(message, context)
        if np.linalg.norm(reply.content["arrays"]["w"].numpy() - start) < 10:
            return reply
        return super().__call__(message, context, lambda m, c: reply)
"""
    local = _LOCAL.replace("LocalDpMod", "Fair")
    app = written(tmp_path, "fair", mod=mod, mods=local, evaluate=0.0)
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


def test_bounds_are_not_below_those_of_jax_privacy() -> None:
    # jax_privacy 2.0.0: CanaryScoreAuditor(in, out).epsilon_one_run(0.05, 1e-5) and
    # .epsilon_one_run_fdp(0.05, 1e-5) of the same scores.
    theirs = {
        (100, 1e3): (2.32282, 4.37095),
        (200, 3.0): (2.55667, 4.41123),
        (200, 1.5): (1.62488, 2.52904),
        (1000, 3.0): (3.82584, 6.04921),
        (1000, 1.0): (1.16417, 1.55755),
    }
    for seed, ((coins, mu), bounds) in enumerate(theirs.items()):
        draws = np.random.default_rng(seed)
        heads = draws.random(coins) < 0.5
        values = draws.normal(size=coins) + mu * heads
        scores = Scores(view="server", values=values, coins=heads, cosines=values)
        for gaussian, bound in zip((False, True), bounds, strict=True):
            tests = coin_tests(
                Claim(epsilon=1.0, delta=1e-5, mu=mu_of(1.0, 1e-5) if gaussian else None), scores
            )
            assert max(test.bound(0.05 / len(tests)) for test in tests) >= bound


def test_true_claims_are_refuted_as_seldom_as_the_level_says() -> None:
    # Randomised response, for which the bound is tight: each coin is told right with the chance
    # that (epsilon, 0) allows. All of its guesses are one hypothesis; the level is for all of them.
    claim, right = Claim(epsilon=1.0, delta=1e-9), math.e / (1 + math.e)
    draws, wrong = np.random.default_rng(5), 0
    for _ in range(600):
        heads = draws.random(200) < 0.5
        told = np.where(draws.random(200) < right, heads, ~heads)
        values = np.where(told, 1.0, -1.0) * draws.random(200)
        scores = Scores(view="server", values=values, coins=heads, cosines=values)
        wrong += any(holm([test.p for test in coin_tests(claim, scores)]))
    assert 600 * 0.005 <= wrong <= 600 * 0.05


@pytest.mark.parametrize("gaussian", [False, True])
def test_a_claim_far_below_the_truth_is_refuted(gaussian: bool) -> None:
    draws = np.random.default_rng(6)
    heads = draws.random(200) < 0.5
    values = draws.normal(size=200) + 4.0 * heads
    scores = Scores(view="server", values=values, coins=heads, cosines=values)
    tests = coin_tests(
        Claim(epsilon=1.0, delta=1e-5, mu=mu_of(1.0, 1e-5) if gaussian else None), scores
    )
    assert any(holm([test.p for test in tests]))


def test_noise_that_all_clients_share_is_taken_away() -> None:
    draws, clients = np.random.default_rng(7), 10
    shared = draws.normal(size=clients) * 100
    heads = draws.random(clients) < 0.5
    pulls = np.tile(shared, (clients, 1)) + np.diag(1.0 * heads)
    run = CanaryRun(
        coins=heads,
        own_noise=False,
        entries=1000,
        clients=np.arange(clients),
        rounds=np.ones(clients, np.int64),
        pulls=pulls,
        noise=np.zeros((clients, 0)),
        steps=np.zeros((0, clients)),
        step_noise=np.zeros((0, 0)),
        total_length=1.0,
    )
    scores = server_scores([run])
    assert scores is not None
    assert scores.values == pytest.approx(1.0 * heads)


def test_noise_that_comes_again_is_seen() -> None:
    draws = np.random.default_rng(8).normal(size=(20, 500))
    assert repeated_noise(draws)[1] > 0.01
    again = np.concatenate([draws, draws[3:4] + 0.3 * draws[5:6]])
    alike, p = repeated_noise(again)
    assert alike > 0.9
    assert p < 1e-6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epsilon=1", "claims = 'epsilon=1': expected delta=NUMBER in it"),
        ("epsilon=1,delta=x", "delta = 'x': expected a number"),
        ("epsilon=1,delta=1e-5,who=me", "claims = 'who=me': expected 'name=value' with commas"),
        ("epsilon=1,epsilon=2,delta=1e-5", "each name once"),
        ("epsilon=1,delta=2", "delta = 2.0: expected a number strictly between 0 and 1"),
        ("epsilon=-1,delta=1e-5", "epsilon = -1.0: expected"),
        ("epsilon=1,delta=1e-5,view=peer", "view = 'peer': expected"),
    ],
)
def test_a_claim_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=re.escape(message)):
        read_claim(text)


def test_a_round_and_a_training() -> None:
    once = Claim(epsilon=1.0, delta=1e-5, per="round")
    assert (once.over(3).epsilon, once.over(3).delta) == pytest.approx((3.0, 3e-5))
    gaussian = Claim(epsilon=4.377178, delta=1e-5, per="round", mu=1.0)
    assert gaussian.over(4).epsilon == epsilon_of(2.0, 1e-5)
