"""`flwr-privacy best-rounds`: the numbers of the specification, and of a search over all T."""

import pytest
from commands import Command

from flwr_privacy.simulations.research.udp.theory import PLProblem, bound_corrected, bound_paper

# Facts F16 and F17: an MLP of 203,530 weights, 50 clients with 800 records.
USUAL = {
    "--unit": "record",
    "--delta": "1e-3",
    "--loss": "2.3",
    "--convexity": "0.1",
    "--parameters": "203530",
}


def printed(command: Command, **changes: str) -> dict[str, tuple[int, float]]:
    """Return the best T and the loss of each bound."""
    options = {**USUAL, **{f"--{key.replace('_', '-')}": value for key, value in changes.items()}}
    done = command("best-rounds", *(part for pair in options.items() for part in pair))
    assert done.returncode == 0, done.stderr
    _, corrected, paper, _ = done.stdout.splitlines()
    return {
        name: (int(line[18:26]), float(line[26:]))
        for name, line in (("corrected", corrected), ("paper", paper))
    }


@pytest.mark.parametrize(
    ("epsilon", "paper", "corrected"), [("4", 86, 8), ("8", 100, 19), ("20", 117, 38)]
)
def test_F16_F17_the_best_rounds(
    command: Command, epsilon: str, paper: int, corrected: int
) -> None:
    found = printed(command, epsilon=epsilon)
    assert (found["paper"][0], found["corrected"][0]) == (paper, corrected)


def test_no_other_number_of_rounds_has_a_smaller_bound(command: Command) -> None:
    found = printed(
        command,
        epsilon="6",
        clients="40",
        per_round="25",
        difference="0.2",
        learning_rate="0.5",
        smoothness="1.5",
        records="300",
        clipping_norm="2.0",
        parameters="50",
    )
    problem = PLProblem(
        Theta=2.3,
        mu=0.1,
        Lc=1.5,
        eta=0.5,
        U=40,
        K=25,
        epsilon=6.0,
        delta=1e-3,
        Dl=2 * 0.5 * 2.0 / 300,
        epsd=0.2,
        d=50,
    )
    for name, bound in (("corrected", bound_corrected), ("paper", bound_paper)):
        losses = [bound(problem, rounds) for rounds in range(1000)]
        best = min(range(1000), key=losses.__getitem__)
        assert found[name][0] == best > 0
        assert found[name][1] == pytest.approx(losses[best], rel=5e-3)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--convexity", "2", "mu = 2.0"),
        ("--learning-rate", "1.5", "eta = 1.5"),
        ("--per-round", "60", "K = 60"),
        ("--epsilon", "0", "epsilon = 0.0"),
    ],
)
def test_a_wrong_option_is_one_line_and_an_exit_code(
    command: Command, option: str, value: str, text: str
) -> None:
    options = {**USUAL, "--epsilon": "4", option: value}
    done = command("best-rounds", *(part for pair in options.items() for part in pair))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
