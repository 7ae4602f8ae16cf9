"""Central DP's two halves together: what is refused, and what is promised against whom."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import MODEL, make
from central_training import kill_after, run
from conformance import Killed
from flwr.serverapp.strategy import Strategy

from flwr_privacy.central_dp.mean import CentralMean
from flwr_privacy.central_dp.terms import CentralDPTerms
from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.privacy.failures import FAILED_NAME
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import released_names
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import CentralDP, LoopOptions, ServerNoise, UserLevel

POISSON = {"noise": "server", "sampling": "poisson"}


# -- Refusals ------------------------------------------------------------------------------------


def test_the_client_declines_outside_of_a_secure_sum_whoever_asks(caplog: Any) -> None:
    class Bare(CentralDP):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.secure_sum = None
            self._build()

    with caplog.at_level("WARNING", "flwr.privacy"):
        result = run(Bare(loop=LoopOptions(seed=1)), num_rounds=1)
    assert result.history[1]["refused"] == {"declined": 5}
    assert "was asked for outside of a secure sum" in caplog.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epsilon": 0.0}, r"epsilon = 0\.0"),
        ({"delta": 1.0}, r"delta = 1\.0"),
        ({"clipping_norm": 0.0}, r"clipping_norm = 0\.0"),
        ({"clipping_norm": math.nan}, "clipping_norm = nan"),
        ({"noise": "client"}, "noise = 'client'"),
        ({"sampling": "shuffled"}, "sampling = 'shuffled'"),
        ({"rounds": 0}, "rounds = 0"),
        ({"quantile": 1.5}, r"quantile = 1\.5"),
        ({"quantile": 0.5, "clipping_learning_rate": 0.0}, r"learning_rate = 0\.0"),
        ({"quantile": 0.5, "count_share": 0.0}, r"count_share = 0\.0"),
        ({"quantile": 0.5, "count_share": 1.0}, r"count_share = 1\.0"),
        ({"count_share": 0.2}, "AdaptiveClipping needs 'quantile': it is required"),
        (
            {"privacy": UserLevel()},
            r"privacy = .*: expected DistributedNoise\(...\) or ServerNoise",
        ),
        ({"clipping": 0.5}, r"clipping = 0.5: expected AdaptiveClipping\(...\) or None"),
        ({"grid_bits": 31}, "grid_bits = 31"),
        ({"insecure_seed": 1}, "CentralDP has no 'insecure_seed': only with noise=server"),
        ({"noise": "server", "insecure_seed": -1}, "insecure_seed = -1"),
        ({**POISSON, "secure_sum": SecureSum()}, "secure_sum = .*: the clients of a secure sum"),
        (
            {"sampling": "poisson", "secure_sum": SecureSum(threshold=3)},
            "secure_sum.threshold = 3: expected none with sampling = 'poisson'",
        ),
        ({"secure_sum": True}, "secure_sum = True"),
        ({"train_metrics_aggr_fn": lambda *_: None}, "train_metrics_aggr_fn"),
    ],
)
def test_parameters_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        make(CentralDP, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"grid_bits": 3}, "finer grid"),
        ({"grid_bits": 30}, "coarser grid"),
        ({"grid_bits": 8, "noise": "server", "epsilon": 1e7}, "sigma = "),
        ({"keep_back": ["nonesuch"]}, r"keep_back = \['nonesuch'\]"),
        ({"secure_sum": SecureSum(threshold=6)}, "secure_sum.threshold = 6"),
        ({"secure_sum": SecureSum(modulus_bits=20)}, "secure_sum.modulus_bits = 20"),
        ({"sampling": "poisson", "secure_sum": SecureSum(modulus_bits=20)}, "modulus_bits = 20"),
    ],
)
def test_parameters_that_do_not_fit_the_federation_end_the_run(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        run(make(CentralDP, **options), num_rounds=1)


def test_a_start_of_ones_own_has_to_say_how_many_rounds_there_are() -> None:
    class Own(CentralDP):
        start = Strategy.start

    with pytest.raises(InvalidParameterError, match="rounds = None"):
        run(Own(privacy=ServerNoise()))


def test_a_resume_with_other_terms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(CentralDP(loop=LoopOptions(seed=1, run_dir=tmp_path, on_round=kill_after(1))))
    for options, rounds, text in (
        ({"epsilon": 9.0}, 3, r"calibrated for epsilon = 8\.0, not 9\.0"),
        ({"noise": "server"}, 3, "calibrated for noise = 'distributed', not 'server'"),
        ({"clipping_norm": 2.0}, 3, r"calibrated for clipping_norm = 1\.0, not 2\.0"),
        ({"quantile": 0.5}, 3, r"calibrated for count_share = 0\.0, not 0\.1"),
        ({}, 30, "calibrated for rounds = 3, not 30"),
    ):
        strategy = make(CentralDP, seed=1, run_dir=tmp_path, resume=True, **options)
        with pytest.raises(CheckpointError, match=text):
            run(strategy, num_rounds=rounds)


def test_the_secret_of_the_samples_is_in_the_checkpoint_and_nowhere_else(
    tmp_path: Path, caplog: Any
) -> None:
    with caplog.at_level("DEBUG"):
        strategy = make(CentralDP, **POISSON, seed=1, run_dir=tmp_path)
        run(strategy)
    secret = strategy.state_dict()["participants"]["seed"]
    assert len(secret) == 32
    another = make(CentralDP, **POISSON).state_dict()["participants"]["seed"]
    assert secret != another
    assert CentralDP().state_dict()["participants"]["seed"] == b""
    assert secret.hex() not in caplog.text
    for path in tmp_path.iterdir():
        if path.name != "checkpoint.bin":
            assert secret.hex() not in path.read_text()
    assert (tmp_path / "checkpoint.bin").stat().st_mode & 0o077 == 0


# -- The promise ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said", "unsaid"),
    [
        (
            {},
            [
                "an honest-but-curious server and clients that collude with it",
                "the data of one client are replaced by any other",
                "of 5 clients at most 1 collude",
                "a sum over less than 3 is not opened",
                "at least 2 honest shares are in it",
                "Not protected: who takes part",
                "(not uploaded at all: batches)",
            ],
            ["trusted"],
        ),
        ({"sampling": "poisson"}, ["replaced by any other", "who takes part"], ["trusted"]),
        (
            {"noise": "server"},
            ["whoever sees the models, and no message", "the server is trusted: it sees every cl"],
            ["collude"],
        ),
        (
            {"noise": "server", "secure_sum": SecureSum()},
            ["the server is trusted: it sees the sum before its noise", "Secure sum: "],
            [],
        ),
        (
            {"neighbours": "zero_out"},
            [
                "for data sets where the contribution of one client to the sums is zero",
                "a client whose data are replaced by any other, beyond what half the noise",
            ],
            ["trusted"],
        ),
        ({**POISSON, "neighbours": "zero_out"}, ["of one client to the sums is zero"], []),
        (
            POISSON,
            [
                "and neither a message nor who takes part",
                "one client is there or not",
                "it draws each client by itself and tells nobody who is drawn",
            ],
            ["Not protected: who takes part"],
        ),
    ],
)
def test_the_promise_says_against_whom_and_on_what_it_rests(
    options: dict[str, Any], said: list[str], unsaid: list[str]
) -> None:
    strategy = make(CentralDP, seed=1, **options)
    assert "(8, 1e-05)-differential privacy" in strategy.guarantee().text()
    promise = run(strategy).guarantee
    text = promise.text()
    for words in said:
        assert words in text
    for words in unsaid:
        assert words not in text
    assert (promise.epsilon, promise.delta, promise.void) == (8.0, 1e-5, "")
    assert promise.spent == pytest.approx(8.0, rel=1e-5)
    usual = "add_remove" if POISSON.items() <= options.items() else "replace_one"
    assert strategy.card().relation() == options.get("neighbours", usual)


@pytest.mark.parametrize("options", [{}, {"noise": "server", "insecure_seed": 1}])
def test_a_seed_voids_the_guarantee(options: dict[str, Any]) -> None:
    engine = {} if options else {"insecure_seed": 5}
    result = run(make(CentralDP, seed=1, **options), num_rounds=1, **engine)
    assert result.guarantee.text().startswith("VOID: ")
    assert "from an insecure seed" in result.guarantee.void


def test_a_reply_that_weighs_more_is_refused() -> None:
    terms = CentralDPTerms(
        noise="distributed",
        sampling="fixed",
        neighbours="replace_one",
        noise_multiplier=2.0,
        epsilon=10.0,
        delta=1e-5,
        gap=1e-3,
        clipping_norm=1.0,
        grid=-20,
    )
    mean = CentralMean(MODEL, terms)
    codes = {name: np.zeros(MODEL[name].shape, np.int32) for name in released_names(MODEL)}
    codes[FAILED_NAME] = np.zeros(1, np.int32)
    with pytest.raises(ReplyRefusedError, match="2: every client weighs 1"):
        mean.accumulate("a", codes, weight=2)
    mean.accumulate("a", codes, weight=1)
    with pytest.raises(InvalidParameterError, match="noise = 'distributed': expected server"):
        mean.add_noise(SecureRandom.insecure(0))
