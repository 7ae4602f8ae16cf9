"""Searches for the number of rounds T after which UDP's loss is least, by the paper's bounds."""

from collections.abc import Sequence

from .theory import (
    SEARCH_GRID,
    PLProblem,
    b_corrected,
    b_paper,
    bound_corrected,
    bound_paper,
    c_corrected,
    c_paper,
    optimal_rounds,
    search_cost,
)

__all__ = ["best_rounds"]


def best_rounds(
    problem: PLProblem,
    *,
    epsilon: float,
    delta: float,
    grid: Sequence[int] = SEARCH_GRID,
    repeats: int = 1,
) -> list[str]:
    """Return, as lines of text, the best T by each bound, and what a search by trainings costs.

    Parameters
    ----------
    problem : PLProblem
        The training.
    epsilon, delta : float
        What one training truly gives.
    grid, repeats
        As of `search_cost`.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> problem = PLProblem(
    ...     Theta=2.3, mu=0.1, Lc=1.0, eta=1.0, U=50, K=50, epsilon=4.0, delta=1e-3, Dl=0.0025,
    ...     d=203530,
    ... )
    >>> for line in best_rounds(problem, epsilon=4.0, delta=1e-3):
    ...     print(line)
    bound               best T  loss at most
    corrected                8          1.49
    as printed              86       0.00259
    search by trainings: 11 trainings with 1460 rounds, together (19.8, 0.001)-DP
    """
    corrected = optimal_rounds(problem.Theta, problem.A, b_corrected(problem), c_corrected(problem))
    printed = optimal_rounds(problem.Theta, problem.A, b_paper(problem), c_paper(problem))
    cost = search_cost(grid, epsilon=epsilon, delta=delta, repeats=repeats)
    rows = (
        ("corrected", corrected, bound_corrected(problem, corrected)),
        ("as printed", printed, bound_paper(problem, printed)),
    )
    return [
        f"{'bound':<18}{'best T':>8}  {'loss at most':>12}",
        *(f"{name:<18}{rounds:>8}  {loss:>12.3g}" for name, rounds, loss in rows),
        f"search by trainings: {cost.runs} trainings with {cost.rounds} rounds, together "
        f"({cost.epsilon:.3g}, {delta:g})-DP",
    ]
