"""`flwr-privacy calibrate` against the published table, and `verify` on runs and broken cards."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from scipy.optimize import brentq
from scipy.stats import binom, norm

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.simulations.calibration.formulas import (
    HEAD,
    Calibration,
    calibrate,
    legend,
    table,
)

DELTA = 1e-3


def gaussian_epsilon(mu: float, delta: float = DELTA) -> float:
    def excess(epsilon: float) -> float:
        a, b = mu / 2, epsilon / mu
        return float(norm.cdf(a - b) - math.exp(epsilon + norm.logcdf(-a - b)) - delta)

    return float(brentq(excess, 0.0, 1000.0, xtol=1e-12))


def formulas(**settings: Any) -> dict[str, Calibration]:
    return {row.formula: row for row in calibrate(delta=DELTA, **settings)}


DEFAULT = "gdp_fixed (default)"
PACED = ["paper, CRD", "paper, Lei"]
MODES = ["paper", *PACED, "zcdp", "gdp", DEFAULT, "gdp_worst", "pld_secret"]

# The columns of section 7.2 of the specification where everybody takes part in 200 rounds.
EVERYBODY = [
    # epsilon, noise of (10), true epsilon, by RDP, noise that is needed
    (4.0, 13.141, 3.438, 3.868, 11.640),
    (8.0, 6.571, 8.353, 9.257, 6.788),
    (20.0, 2.628, 30.317, 32.807, 3.489),
]


@pytest.mark.parametrize(("epsilon", "noise", "true", "rdp", "needed"), EVERYBODY)
def test_F9_the_papers_noise_is_shown_with_what_it_truly_gives(
    epsilon: float, noise: float, true: float, rdp: float, needed: float
) -> None:
    rows = formulas(epsilon=epsilon, rounds=200)
    assert list(rows) == MODES
    paper = rows["paper"]
    assert paper.claimed == epsilon
    assert paper.noise_multiplier == pytest.approx(noise, abs=6e-4)
    for view in (paper.server, paper.often, paper.every_round, paper.hidden):
        assert view == pytest.approx(true, abs=6e-4)
    # Other orders than the table's may be better or worse by a tenth of a percent.
    assert paper.often_rdp == pytest.approx(rdp, rel=1.5e-3)
    for mode in ("gdp", DEFAULT, "gdp_worst", "pld_secret"):  # one and the same if all take part
        assert rows[mode].noise_multiplier == pytest.approx(needed, abs=6e-4)
        assert rows[mode].server == pytest.approx(epsilon, rel=1e-8)


def test_F9_for_12_and_16_too() -> None:
    for epsilon, true in ((12.0, 14.4914), (16.0, 21.8175)):
        paper = formulas(epsilon=epsilon, rounds=200)["paper"]
        assert paper.server == pytest.approx(true, rel=2e-5)


# The same where a part of the clients is asked: the noise of (10), the epsilon of the server's
# view, of a client in all rounds and of hidden participation.
PARTS = [
    (0.6, 200, 4.0, 10.179, 3.453, 4.737, 2.521),
    (0.6, 200, 8.0, 5.090, 8.411, 11.780, 6.052),
    (0.6, 200, 20.0, 2.036, 30.746, 44.769, 21.689),
    (0.1, 200, 8.0, 2.078, 9.061, 43.373, 2.183),
]


@pytest.mark.parametrize(
    ("q", "rounds", "epsilon", "noise", "server", "every_round", "hidden"), PARTS
)
def test_F12_where_not_everybody_takes_part_it_is_shown_for_each_view(
    q: float,
    rounds: int,
    epsilon: float,
    noise: float,
    server: float,
    every_round: float,
    hidden: float,
) -> None:
    paper = next(calibrate(epsilon=epsilon, delta=DELTA, rounds=rounds, q=q))
    assert paper.formula == "paper"
    assert paper.noise_multiplier == pytest.approx(noise, abs=6e-4)
    assert paper.server == pytest.approx(server, abs=6e-4)
    assert paper.every_round == pytest.approx(every_round, rel=1e-4)
    assert paper.hidden == pytest.approx(hidden, rel=1e-2)
    most = int(binom.ppf(0.99, rounds, q))
    usual = gaussian_epsilon(math.sqrt(most) / paper.noise_multiplier)
    assert paper.often == pytest.approx(usual, rel=1e-9)
    assert paper.hidden < paper.server < paper.often < paper.every_round


def test_each_formula_keeps_its_claim_for_what_it_is_meant_for() -> None:
    rows = formulas(epsilon=8.0, rounds=200, q=0.6)
    mean = gaussian_epsilon(math.sqrt(120) / rows["gdp"].noise_multiplier)
    assert mean == pytest.approx(8.0, rel=1e-8)
    assert rows[DEFAULT].often == pytest.approx(8.0, rel=1e-8)
    assert rows["gdp_worst"].every_round == pytest.approx(8.0, rel=1e-8)
    assert rows["pld_secret"].hidden == pytest.approx(8.0, rel=1e-5)
    assert rows["pld_secret"].noise_multiplier == pytest.approx(4.121, abs=6e-4)  # section 7.2
    # The moments of the paper, over 120 rounds: a / 2 + sqrt(2 a ln(1 / delta)).
    a = 120 / rows["zcdp"].noise_multiplier ** 2
    assert a / 2 + math.sqrt(2 * a * math.log(1 / DELTA)) == pytest.approx(8.0, rel=1e-8)
    assert rows["paper"].often > 8
    assert rows["paper"].server > 8
    assert all(row.often < row.often_rdp for row in rows.values())


def test_a_client_that_is_asked_less_than_once_has_one_round() -> None:
    rows = calibrate(epsilon=1.0, delta=DELTA, rounds=4, q=0.1)
    gdp = next(row for row in rows if row.formula == "gdp")
    assert gdp.noise_multiplier == pytest.approx(2.574657, rel=1e-5)  # fact F13


def test_sigma_is_in_units_of_the_weights() -> None:
    rows = formulas(epsilon=4.0, rounds=200, sensitivity=9e-5)
    assert all(row.sigma == row.noise_multiplier * 9e-5 for row in rows.values())
    assert rows["paper"].sigma == pytest.approx(1.182717e-3, rel=1e-5)


def test_with_a_secret_sample_only_what_is_sound_for_it_is_shown() -> None:
    rows = formulas(epsilon=2.0, rounds=20, sampling_rate=0.1)
    assert list(rows) == [DEFAULT]
    (row,) = rows.values()
    assert row.often == row.every_round == row.hidden < row.often_rdp <= 2
    full = formulas(epsilon=2.0, rounds=20)[DEFAULT]
    assert row.noise_multiplier < full.noise_multiplier
    assert math.isnan(row.server)
    assert table([row]).splitlines()[1].split()[5] == "-"
    assert "pld_secret" not in legend(20, 1.0, sampling_rate=0.1)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"rounds": 0}, "rounds"),
        ({"q": 0.0}, "q"),
        ({"q": 1.5}, "q"),
        ({"sampling_rate": 0.0}, "sampling_rate"),
        ({"sampling_rate": 1.5}, "sampling_rate"),
        ({"sampling_rate": 0.5, "epsilon": 0.0}, "epsilon"),
    ],
)
def test_a_value_out_of_range_is_named(change: dict[str, Any], name: str) -> None:
    settings: dict[str, Any] = {"epsilon": 8.0, "delta": DELTA, "rounds": 20, **change}
    with pytest.raises(InvalidParameterError, match=f"{name} = "):
        next(calibrate(**settings))


def test_the_table_marks_what_is_more_than_claimed() -> None:
    made = list(calibrate(epsilon=8.0, delta=DELTA, rounds=200, q=0.6))
    head, *lines = table(made).splitlines()
    assert head.split() == [
        *("formula", "sigma/sens.", "sigma", "claimed", "server"),
        *("99", "%", "99", "%", "rdp", "all", "rounds", "hidden"),
    ]
    assert lines[0].split() == [
        *("paper", "5.0896", "5.0896", "8"),
        *("8.4112!", "9.078!", "10.046", "11.78!", "6.0519"),
    ]
    assert lines[5].split()[-5:] == ["7.4158", "8", "8.8755", "10.35!", "5.3482"]
    assert [line[: len(row.formula)] for line, row in zip(lines, made, strict=True)] == MODES


def test_the_legend_names_every_column_and_formula() -> None:
    text = legend(200, 0.6)
    assert "for a client in 136 of 200 rounds, the most for 99 % of clients" in text
    assert "  paper       120 rounds, what a client has on average" in text
    for name in (*HEAD[4:], *(mode.split()[0] for mode in MODES)):
        assert f"\n  {name} " in text
    assert max(map(len, text.splitlines())) <= 100


# -- The commands -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [(), ("udp",)])
def test_the_command_shows_the_formulas_side_by_side(
    command: Command, scheme: tuple[str, ...]
) -> None:
    done = command(
        "calibrate",
        *scheme,
        "--unit",
        "record",
        "--epsilon",
        "8",
        "--delta",
        "1e-3",
        "--rounds",
        "200",
    )
    assert done.returncode == 0
    head, *lines = done.stdout.splitlines()
    assert head == (
        "budget: epsilon 8 at delta 0.001 over 200 rounds; unit: record; sensitivity of a "
        "release: 0.0025"
    )
    assert lines[1].split() == [
        *("paper", "6.5707", "0.016427", "8"),
        *("8.3527!", "8.3527!", "9.2569", "8.3527!", "8.3527!"),
    ]
    assert [line.split()[0] for line in lines[1:9]] == [mode.split()[0] for mode in MODES]
    assert "\n".join(lines[9:-2]) == legend(200, 1.0)
    assert lines[-2].startswith("A run with noise=gdp_fixed: noise multiplier 6.79685. ")


def test_the_command_scales_the_noise_to_what_is_released(command: Command) -> None:
    budget = (
        "calibrate",
        "--unit",
        "record",
        "--epsilon",
        "4",
        "--delta",
        "1e-3",
        "--rounds",
        "200",
    )
    record = command(*budget, "--learning-rate", "0.02", "--clipping-norm", "1.8")
    assert "sensitivity of a release: 9e-05" in record.stdout
    assert "0.0011827" in record.stdout
    user = command(*budget, "--unit", "user", "--clipping-norm", "0.5", "--fraction", "0.6")
    assert "unit: user; sensitivity of a release: 1\n" in user.stdout
    assert user.stdout.splitlines()[2].split()[1:5] == ["10.179", "10.179", "4", "3.4535"]
    assert "a client in 136 of 200 rounds" in user.stdout


def test_the_command_knows_of_secret_samples(command: Command) -> None:
    done = command(
        "calibrate",
        "--unit",
        "record",
        "--epsilon",
        "2",
        "--rounds",
        "20",
        "--sampling-rate",
        "0.1",
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[2].split()[4:6] == ["2", "-"]
    assert "gdp_worst" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--epsilon", "0"), "epsilon = 0.0: expected a number above 0"),
        (("--epsilon", "8", "--delta", "1"), "delta = 1.0: expected a number strictly"),
        (("--epsilon", "8", "--unit", "clients"), "unit = 'clients': expected one of"),
        (("--epsilon", "8", "--rounds", "0"), "rounds = 0"),
        (("--epsilon", "8", "--records", "0"), "records = 0"),
        (("--epsilon", "8", "--clipping-norm", "0"), "clipping_norm = 0.0"),
        (
            ("mspdq", "--epsilon", "8"),
            "scheme = 'mspdq': expected one of 'acfl', 'acfl-scfl', 'central-dp', 'm2fdp', ",
        ),
    ],
)
def test_a_wrong_budget_is_one_line_and_an_exit_code(
    command: Command, arguments: tuple[str, ...], text: str
) -> None:
    done = command("calibrate", "--unit", "record", *arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_wrong_sampling_rate_is_one_line_and_an_exit_code(command: Command) -> None:
    done = command("calibrate", "--unit", "record", "--epsilon", "8", "--sampling-rate", "0")
    assert "sampling_rate = 0.0" in done.stderr


def test_there_is_no_sample_of_records_at_user_level(command: Command) -> None:
    user = ("calibrate", "--epsilon", "8", "--rounds", "1", "--unit", "user")
    done = command(*user, "--sampling-rate", "0.5")
    assert done.returncode == 2


RUN = (
    "run",
    "--engine",
    "inline",
    "--scheme",
    "udp",
    "--set",
    "unit=record",
    "--clients",
    "4",
    "--rounds",
    "2",
)


def test_a_run_can_be_verified_with_its_folder_and_its_card_alone(
    command: Command, tmp_path: Path
) -> None:
    ran = command(*RUN, "--out", "r")
    assert ran.returncode == 0, ran.stderr
    whole = command("verify", "r")
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.startswith("card: r\nudp protects one record of a client against")
    assert "epsilon (gdp): stated 8, recomputed 8\n" in whole.stdout
    assert (
        "simulated: 2 releases of 4 clients: consistent; the clients are simulated" in whole.stdout
    )
    card = tmp_path / "elsewhere.json"
    card.write_bytes((tmp_path / "r" / "privacy-card.json").read_bytes())
    alone = command("verify", str(card))
    assert alone.returncode == 20
    assert "arithmetic: 2 releases of 4 clients: the charges on the card give" in alone.stdout

    entries = json.loads(card.read_text())
    for change in (
        {"epsilon": {**entries["epsilon"], "gdp": 7.5}},
        {"releases": entries["releases"][:1]},
        {"guarantee": {**entries["guarantee"], "epsilon": 5.0}},
        {"answers": {**entries["answers"], "unanswered": 1}},
    ):
        card.write_text(json.dumps({**entries, **change}))
        done = command("verify", str(card))
        assert done.returncode == 27
        assert "\nfail  charges: the c" in done.stdout
        assert "refused: " in done.stdout.splitlines()[-1]


def test_a_run_without_a_budget_has_nothing_to_verify(command: Command) -> None:
    fedavg = ("run", "--engine", "inline", "--clients", "4", "--rounds", "1", "--out", "r")
    assert command(*fedavg).returncode == 0
    done = command("verify", "r")
    assert done.returncode == 24
    assert done.stdout.startswith("card: r\nfedavg protects nothing")
    assert "epsilon (" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("nothing: 0 releases of 0 clients: there is")


@pytest.mark.parametrize("text", ["", "{", "{}", '{"version": 2}', "[]", "\u00e9"])
def test_what_is_no_card_is_named_in_one_line(command: Command, tmp_path: Path, text: str) -> None:
    (tmp_path / "card.json").write_text(text, encoding="latin-1")
    done = command("verify", "card.json")
    assert done.returncode == 3
    assert "privacy card" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_folder_without_a_card_is_named(command: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        done = command("verify", name)
        assert done.returncode == 2
        assert f"run = '{name}': expected the folder of a run with a privacy-card.json" in (
            done.stderr
        )


def test_a_card_that_is_made_by_hand_is_recomputed(command: Command, tmp_path: Path) -> None:
    from flwr_privacy.accounting import Charge
    from flwr_privacy.privacy.card import CardRelease
    from flwr_privacy.privacy.guarantee import Guarantee

    promise = Guarantee(scheme="s", protects="p", adversary="a", epsilon=9.0, delta=DELTA)
    noise = Charge(neighbours="replace_one", noise_multiplier=6.570652, count=200)
    asked = {"phase": "train", "server_round": 1, "request": 0, "clients": ("x",)}
    release = CardRelease(**asked, charge=noise, unanswered=("x",))
    card = PrivacyCard(experiment_id="e", guarantee=promise, releases=[release])
    card.state(["gdp"])
    (tmp_path / "card.json").write_text(card.to_json())
    done = command("verify", "card.json")
    assert "epsilon (gdp): stated 8.35272, recomputed 8.35272" in done.stdout
    assert "answers: 1 charged, 0 answered, 1 never answered\n" in done.stdout
    assert "arithmetic: 1 releases of 1 clients" in done.stdout


TREE = ("--set", "fanouts=2,2", "--set", "p=0.5")
PLANNED = [
    ("udp", ("--unit", "user"), ("--set", "unit=user")),
    ("udp", ("--unit", "record"), ("--set", "unit=record")),
    (
        "udp",
        ("--unit", "record", "--sampling-rate", "0.5"),
        ("--set", "unit=record", "--set", "sampling_rate=0.5"),
    ),
    ("central-dp", (), ()),
    ("central-dp", ("--set", "noise=server"), ("--set", "noise=server")),
    ("m2fdp", ("--unit", "device", *TREE), ("--set", "unit=device", *TREE)),
    (
        "m2fdp",
        ("--unit", "record", "--set", "sampling_rate=0.1", *TREE),
        ("--set", "unit=record", "--set", "sampling_rate=0.1", *TREE),
    ),
    (
        "m2fdp",
        ("--unit", "device", *TREE, "--set", "client_sampling=fixed"),
        ("--set", "unit=device", *TREE, "--set", "client_sampling=fixed"),
    ),
    ("m2fdp-hfl-dp", ("--set", "fanouts=2,2"), ("--set", "fanouts=2,2")),
    ("m2fdp-pedpfl", (), ()),
    ("acfl", (), ("--task", "digits-rff")),
    ("acfl", ("--set", "setup_share=0.3"), ("--task", "digits-rff", "--set", "setup_share=0.3")),
]
EVALUATED = ("--set", "evaluation=private", "--set", "share=0.2")
EVERY = ("--set", "evaluation={every=2,share=0.3}")
BY_RECORD = ("--set", "sampling_rate=0.1", *TREE)
SOME = ("--set", "noise=server", "--set", "fraction_evaluate=0.25", *EVALUATED)
SUMMED = ("--set", "secure_sum=true", *EVERY)
HALF = ("--per-round", "2")
# As many as it takes for 99 % of the clients to be asked less often than in all of them.
ROUNDS = {("udp", HALF): "7", ("central-dp", ()): "4"}
WITH_EVALUATIONS = [
    ("udp", ("--unit", "user", *EVALUATED), ("--set", "unit=user", *EVALUATED), HALF),
    ("udp", ("--unit", "record", *EVERY), ("--set", "unit=record", *EVERY), ()),
    ("central-dp", EVALUATED, EVALUATED, HALF),
    ("central-dp", SOME, SOME, ()),
    (
        "m2fdp",
        ("--unit", "device", *TREE, *EVALUATED),
        ("--set", "unit=device", *TREE, *EVALUATED),
        HALF,
    ),
    (
        "m2fdp",
        ("--unit", "record", *BY_RECORD, *EVERY),
        ("--set", "unit=record", *BY_RECORD, *EVERY),
        (),
    ),
    ("acfl", SUMMED, ("--task", "digits-rff", *SUMMED), ()),
]


def test_calibrate_shows_what_turns_save_in_a_tree(command: Command) -> None:
    """The numbers of docs/schemes/m2fdp.md: releases of a device, and the noise of its tier."""
    shape = ("--clients", "200", "--set", "unit=device", "--set", "fanouts=4,50", "--set", "p=0.5")
    plan = ("calibrate", "m2fdp", "--rounds", "100", "--epsilon", "8", *shape)
    tenth = ("--fraction", "0.1")
    found = []
    for own in (("--fraction", "1"), (*tenth, "--set", "client_sampling=fixed"), tenth):
        printed = command(*plan, *own).stdout
        found.append(re.findall(r"noise multiplier ([0-9.]+).*; (\d+) releases", printed))
    assert found == [
        [("6.00229", "100"), ("12.0046", "400")],
        [("2.54656", "18"), ("5.09311", "72")],
        [("1.89809", "10"), ("3.79618", "40")],
    ]


@pytest.mark.parametrize("drawn", [(), ("--per-round", "2")], ids=["all", "half"])
@pytest.mark.parametrize(("scheme", "told", "ran"), PLANNED)
def test_the_noise_that_is_printed_is_that_of_the_run(
    command: Command,
    tmp_path: Path,
    scheme: str,
    told: tuple[str, ...],
    ran: tuple[str, ...],
    drawn: tuple[str, ...],
) -> None:
    check_printed(command, tmp_path, scheme, told, ran, drawn)


@pytest.mark.parametrize(("scheme", "told", "ran", "drawn"), WITH_EVALUATIONS)
def test_the_noise_of_evaluations_is_that_of_the_run_too(
    command: Command,
    tmp_path: Path,
    scheme: str,
    told: tuple[str, ...],
    ran: tuple[str, ...],
    drawn: tuple[str, ...],
) -> None:
    rounds = ROUNDS.get((scheme, drawn), "2")
    card = check_printed(command, tmp_path, scheme, told, ran, drawn, rounds)
    assert "evaluate" in {release["phase"] for release in card["releases"]}


def check_printed(
    command: Command,
    tmp_path: Path,
    scheme: str,
    told: tuple[str, ...],
    ran: tuple[str, ...],
    drawn: tuple[str, ...],
    rounds: str = "2",
) -> dict[str, Any]:
    """Check that `calibrate` prints the noise of a run; return the run's card."""
    some = ("--fraction", "0.5") if drawn else ()
    several = () if scheme == "udp" else ("--clients", "4")
    budget = ("--epsilon", "6", "--delta", "1e-4", "--rounds", rounds)
    printed = command("calibrate", scheme, *budget, *several, *some, *told)
    assert printed.returncode == 0, printed.stderr
    start = ("run", "--engine", "inline", "--clients", "4", "--rounds", rounds, "--scheme", scheme)
    budget = ("--set", "epsilon=6", "--set", "delta=1e-4")
    done = command(*start, *budget, *ran, *drawn, "--out", "r")
    assert done.returncode == 0, done.stderr
    card = json.loads((tmp_path / "r" / "privacy-card.json").read_text())
    charged = {f"{release['charge']['noise_multiplier']:.6g}" for release in card["releases"]}
    assert set(re.findall(r"noise multiplier ([0-9.e+-]+[0-9])", printed.stdout)) == charged
    if scheme != "udp":
        stated = {f"{epsilon:.6g}" for epsilon in card["epsilon"].values()}
        found = re.findall(r"([0-9.]+) \((?:gdp|rdp|pld)\)", printed.stdout)
        # Who is not asked each time spends less than what is planned at most.
        assert drawn or told == SOME or stated <= set(found)
    return dict(card)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("central-dp", "--unit", "record"), "unit = 'record': expected one of 'user'"),
        (("acfl", "--unit", "user"), "unit = 'user': expected one of 'record'"),
        (("m2fdp", "--set", "fanouts=2,2", "--clients", "4"), "unit = None: expected unit=device"),
        (
            ("m2fdp", "--unit", "device", *TREE, "--set", "client_sampling=poisson"),
            "client_sampling = 'poisson': expected 'balanced' or 'fixed': a trusted aggregator",
        ),
        (("m2fdp", "--unit", "device"), "fanouts = None: expected the tree of aggregators"),
        (("central-dp", "--records", "9"), "records = 9: expected nothing: it has no effect for"),
        (("central-dp", "--fraction", "0"), "fraction = 0.0: expected a finite number from above"),
        (("udp", "--unit", "user", "--clients", "9"), "clients = 9: expected nothing: it has no"),
        (("udp",), "unit = None: expected one of 'record', 'user'"),
        (
            ("udp", "--unit", "user", "--set", "share=0.2"),
            "share = 0.2: expected nothing for udp, which takes evaluation=private and every, ",
        ),
        (
            ("udp", "--unit", "user", *EVALUATED, "--set", "noise=gdp"),
            "noise = 'gdp': expected nothing for udp",
        ),
        (
            ("udp", "--unit", "user", *EVALUATED, "--set", "fraction_evaluate=2"),
            "fraction_evaluate = 2: expected a finite number from above 0",
        ),
    ],
)
def test_what_a_run_would_refuse_is_refused(
    command: Command, arguments: tuple[str, ...], text: str
) -> None:
    done = command("calibrate", *arguments, "--epsilon", "8")
    assert done.returncode == 2
    assert text in done.stderr
    assert not done.stdout
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("correlated=auto", "the noise of the rounds is correlated (BandedMF): the models have"),
        ("quantile=0.5", "independent: correlated noise needs a clipping norm that does not"),
        ("correlated=none", "the noise of the rounds is independent\n"),
    ],
)
def test_it_says_how_the_noise_of_rounds_goes_together(
    option: str, text: str, command: Command
) -> None:
    options = ("--rounds", "100", "--fraction", "0.1", "--clients", "200", "--epsilon", "8")
    out = command("calibrate", "central-dp", *options, "--set", "noise=server", "--set", option)
    assert text in out.stdout


def test_private_steps_are_counted_over_all_rounds(command: Command) -> None:
    done = command(
        *("calibrate", "udp", "--unit", "dp-sgd", "--epsilon", "8", "--rounds", "10"),
        *("--sampling-rate", "0.02", "--set", "steps=50"),
    )
    assert "(replace_one), sampled at 0.02, gap 1.6e-05; 500 releases at most" in done.stdout
    assert "epsilon at delta 1e-05: 8 (rdp)" in done.stdout
