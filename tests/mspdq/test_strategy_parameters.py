"""Parameters of MSP and MSPDQ: what is refused, the paper's, and how many steps follow."""

import math
from typing import Any

import pytest
from apps import make
from mixing_training import MODEL, run

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.mspdq.theory import k_rounds, lambda2_P
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import MSP, MSPDQ


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kappa": 0.0}, "kappa = 0.0: expected a number between 0 and 1, neither of them"),
        ({"kappa": 1.0}, "kappa = 1.0: expected a number between 0 and 1"),
        ({"kappa": 1.02}, "kappa = 1.02: expected a number between 0 and 1"),
        ({"kappa": math.nan}, "kappa = nan: expected a finite number"),
        ({"gamma": 0.0}, "gamma = 0.0: expected a number above 0"),
        ({"gamma": -0.1}, "gamma = -0.1: expected a number above 0"),
        (
            {"gamma": 0.34, "paper": True},
            r"gamma = 0.34: expected less than max_coupling\(kappa=0.5\) = 0.333333",
        ),
        (
            {"gamma": 0.1, "kappa": 0.89, "paper": True},
            r"gamma = 0.1: expected less than max_coupling\(kappa=0.89\) = 0.099099",
        ),
        (
            {"gamma": 0.9},
            r"gamma = 0.9: expected less than largest_stable\(kappa=0.5, m=1\) = 0.857143",
        ),
        (
            {"gamma": 0.3, "m": 5},
            r"gamma = 0.3: expected less than largest_stable\(kappa=0.5, m=5\) = 0.260870",
        ),
        ({"gamma": 0.9, "coupling": "random"}, "gamma = 0.9: expected less than largest_stable"),
        ({"mixing_rounds": -1}, "mixing_rounds = -1: expected an integer of at least 0"),
        ({"mixing_rounds": 2.0}, "mixing_rounds = 2.0: expected an integer of at least 0"),
        ({"mixing_rounds": lambda t: -t}, "mixing_rounds = -1: expected an integer of at least 0"),
        ({"m": 0}, "m = 0: expected an integer of at least 1"),
        ({"eps_s": -0.1}, "eps_s = -0.1: expected a number from 0 up to but not 1"),
        ({"eps_s": 1.0}, "eps_s = 1.0: expected a number from 0 up to but not 1"),
        ({"split": "laplace", "scale": 0.0}, "scale = 0.0: expected a finite number from 1e-100"),
        ({"coupling": "linear"}, "coupling = 'linear': expected one of 'const', 'harmonic', 'rand"),
        ({"split": "normal"}, "split = 'normal': expected one of 'gaussian', 'laplace', 'uniform'"),
        ({"mass": "equal"}, "mass = 'equal': expected one of 'normalized', 'paper'"),
        ({"on_dropout": "skip"}, "on_dropout = 'skip': expected one of 'continue', 'finish', 'res"),
        (
            {"tolerance": 0.1, "mixing_rounds": 4},
            "tolerance = 0.1: expected nothing beside mixing_rounds: it decides on them",
        ),
        ({"tolerance": 0.0}, "tolerance = 0.0: expected a finite number above 0"),
        (
            {"tolerance": 1e-3, "gamma": 0.1, "coupling": "harmonic"},
            "tolerance = 0.001: expected more: 1000000 mixing steps leave",
        ),
        ({"tolerance": 0.1, "coupling": "random"}, "coupling = 'random': expected one that is kn"),
        (
            {"shares": {"0": 0.0}, "replacement": True},
            "shares = .'0': 0.0.: expected numbers above 0",
        ),
        ({"shares": {"0": -1.0}, "replacement": True}, "shares = .*: expected numbers above 0"),
        ({"shares": {"0": 1e-9, "1": 1e9}}, r"none is 2\^53 times as large as another"),
        (
            {"shares": {"0": math.nan}, "replacement": True},
            r"shares\['0'\] = nan: expected a finite number",
        ),
        ({"secure_sum": SecureSum()}, "secure_sum = .*None: the answers of 'msp' are no codes"),
    ],
)
def test_bad_parameters_of_msp_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        make(MSP, **options)


SUMMED = {"secure_sum": SecureSum()}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bits": 0}, "bits = 0: expected an integer from 1 to 16"),
        ({"bits": 17}, "bits = 17: expected an integer from 1 to 16"),
        ({"bits": 4.0}, "bits = 4.0: expected an integer from 1 to 16"),
        ({"bits": 4, "levels": 17}, "levels = 17: expected an integer from 9 to 16"),
        ({"bits": 4, "levels": 8}, "levels = 8: expected an integer from 9 to 16"),
        (
            {"mixing_start": "global", "mixing_rounds": 0},
            "mixing_rounds = 0: expected at least 1 from a global start",
        ),
        (
            {"mixing_start": "reference", "mixing_rounds": 0},
            "mixing_rounds = 0: expected at least 1 from a reference start",
        ),
        (
            {"mixing_start": "zero"},
            "mixing_start = 'zero': expected one of 'global', 'independent', 'reference'",
        ),
        ({"interval": "l1"}, "interval = 'l1': expected one of 'bound', 'fixed', 'linf', 'paper'"),
        ({"interval": "bound"}, "interval = 'bound': expected another one: it needs the glo"),
        (
            {"interval": "bound", "mixing_start": "global", "coupling": "random"},
            "coupling = 'random': expected one that is known beforehand",
        ),
        *(
            ({name: value}, f"{name} = {value}: expected a finite number from")
            for name in ("pi", "c", "bound")
            for value in (0.0, -1.0, math.nan, math.inf)
        ),
        (
            {"paper": True, "gamma": 0.34},
            r"gamma = 0.34: expected less than max_coupling\(kappa=0.5\) = 0.333333",
        ),
        ({**SUMMED, "bits": 1}, "bits = 1: expected an integer from 2 to 16"),
        ({**SUMMED, "bits": 4, "levels": 16}, "levels = 16: expected an integer from 9 to 15"),
        ({**SUMMED, "mixing_start": "independent"}, "mixing_start|interval"),
        (
            {**SUMMED, "mixing_start": "reference"},
            "mixing_start = 'reference': expected 'global' under a secure sum",
        ),
        (
            {**SUMMED, "mixing_start": "independent", "interval": "fixed"},
            "mixing_start = 'independent': expected 'global' under a secure sum",
        ),
        *(
            (
                {**SUMMED, "interval": rule},
                f"interval = '{rule}': expected 'bound' or 'fixed' under a secure sum",
            )
            for rule in ("self", "linf", "paper")
        ),
        *(
            (
                {**SUMMED, "on_dropout": what},
                f"on_dropout = '{what}': expected 'finish' under a secure sum",
            )
            for what in ("restart", "continue")
        ),
        (
            {**SUMMED, "coupling": "random"},
            "coupling = 'random': expected one that is known beforehand",
        ),
        ({**SUMMED, "mixing_rounds": 0}, "mixing_rounds = 0: expected at least 1 from a global"),
        ({**SUMMED, "gamma": 0.9}, "gamma = 0.9: expected less than largest_stable"),
    ],
)
def test_bad_parameters_of_mspdq_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        make(MSPDQ, **options)


def test_what_is_at_the_edge_is_allowed() -> None:
    MSP(kappa=0.5, gamma=0.3333, paper=True, eps_s=0.0, mixing_rounds=0)
    MSP(gamma=0.857, kappa=0.5)
    MSP(gamma=1.5, coupling="harmonic")  # it falls to zero
    MSP(gamma=0.1, m=30, paper=True)  # figure 7
    MSPDQ(bits=1)
    MSPDQ(bits=16, levels=2**15 + 1, mixing_rounds=0)
    make(MSPDQ, **SUMMED, bits=2, interval="fixed", coupling="random")


def test_a_client_without_a_share_is_named() -> None:
    strategy = MSP(replacement=True, shares={"0": 1.0, "1": 2.0, "3": 1.0})
    with pytest.raises(InvalidParameterError, match=r"shares = \['2'\]: expected a share for each"):
        run(strategy)


def test_the_paper_has_defaults_of_its_own() -> None:
    def told(strategy: Any) -> tuple[Any, ...]:
        t = strategy.terms
        return t.gamma, t.coupling, t.rounds, t.start, t.interval, t.levels

    assert told(MSP()) == (0.3, "const", 10, "independent", "self", 0)
    assert told(MSP(paper=True)) == (0.1, "const", 4, "independent", "self", 0)
    assert told(MSPDQ()) == (0.3, "const", 10, "independent", "self", 256)
    assert told(MSPDQ(paper=True)) == (0.1, "harmonic", 10, "reference", "paper", 256)
    assert told(make(MSPDQ, **SUMMED)) == (0.5, "const", 1, "global", "bound", 255)
    for strategy, paper in ((MSP, True), (MSPDQ, True), (MSP, False)):
        line = run(strategy(paper=paper, min_train_nodes=9 if paper else 2), arrays=MODEL).history
        assert line[1]["scheme"]["draws"] == (9 if paper else 4)


def test_a_tolerance_decides_on_the_steps() -> None:
    assert MSP(gamma=0.1, tolerance=0.1).terms.rounds == 11
    strategy = MSPDQ(gamma=0.3, coupling="harmonic", tolerance=0.1)
    assert strategy.terms.rounds == 13
    assert len(run(strategy).history) == 2


CONVEX = {"mixing_rounds": "theory", "convexity": 1.0, "smoothness": 4.0, "local_steps": 10}


@pytest.mark.parametrize(("kind", "options"), [(MSP, {}), (MSPDQ, {"coupling": "harmonic"})])
def test_the_theorys_steps_by_flat_keys(kind: type[MSP], options: dict[str, Any]) -> None:
    strategy = make(kind, **CONVEX, **options, kappa=0.5, gamma=0.1)
    lam = lambda2_P(0.5, 0.1)
    quantized = kind is MSPDQ
    for t in (1, 2, 30):
        expected = k_rounds(mu=1.0, L=4.0, E=10, t=t, lam=lam, quantized=quantized)
        assert strategy._terms_of(t).rounds == expected
    assert strategy._terms_of(1).rounds < strategy._terms_of(30).rounds
    result = run(make(kind, **{**CONVEX, "convexity": 4.0}))  # theta is 9, eta_1 a twentieth
    steps = k_rounds(mu=4.0, L=4.0, E=10, t=1, lam=lambda2_P(0.5, 0.3), quantized=quantized)
    assert result.history[1]["scheme"]["mixing_rounds"] == steps > 10


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"coupling": "random"}, "mixing_rounds = 'theory': expected a number of steps"),
        ({"m": 2, "gamma": 0.1}, "mixing_rounds = 'theory': expected a number of steps"),
        ({"smoothness": 0.0}, "L = 0.0"),
        ({"mixing_rounds": "theorem"}, "mixing_rounds = 'theorem'.*nearest: 'theory'"),
        ({"mixing_rounds": 4}, "convexity"),
        ({"tolerance": 0.1}, "tolerance = 0.1: expected nothing beside mixing_rounds"),
    ],
)
def test_the_theorys_steps_are_refused_where_there_are_none(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        make(MSP, **{**CONVEX, **options})


SECRET_M = {"m": 3, "m_mode": "iid", "gamma": 0.2}


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (MSP, {"m": 1}, "m_mode = 'iid': expected 'common' where hidden sub-states weigh 1"),
        (MSP, {"mass": "normalized"}, "m_mode = 'iid': expected 'common'"),
        (MSP, {"split": "uniform_m"}, "m_mode = 'iid': expected 'common' with interval"),
        (MSP, {"tolerance": 0.1}, "m_mode = 'iid': expected 'common', known beforehand"),
        (MSP, {"mixing_rounds": "theory"}, "mixing_rounds = 'theory'"),
        (MSPDQ, {"secure_sum": SecureSum()}, "m_mode = 'iid': expected 'common' with interval"),
    ],
)
def test_secret_numbers_are_refused_where_they_do_nothing_or_must_be_known(
    kind: type[MSP], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        make(kind, **{**SECRET_M, **options})


def test_with_secret_numbers_no_residual_is_stated() -> None:
    scheme = run(MSP(**SECRET_M)).history[1]["scheme"]
    assert "residual" not in scheme
    assert scheme["mixing_rounds"] == 10


def test_the_theorys_number_of_steps_grows_with_the_round() -> None:
    """mu = 1, L = 4, E = 10: theta is 31, so 1 / eta is 16, 32 and 48 here."""

    def steps(server_round: int) -> int:
        t = 32 * (server_round - 1) + 1
        return k_rounds(mu=1, L=4, E=10, t=t, lam=0.6, quantized=False)

    strategy = MSP(mixing_rounds=steps)
    result = run(strategy, arrays=MODEL, num_rounds=3)
    # ln(16), ln(32) and ln(48) over -ln(0.6) are 5.4, 6.8 and 7.6.
    assert [line["exchanges"] for line in result.history] == [1, 7, 8, 9]
    assert [line["scheme"]["mixing_rounds"] for line in result.history[1:]] == [6, 7, 8]
