"""Parts of the strategies that spread a privacy budget over the rounds of a training."""

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.card import PrivacyCard

__all__ = ["budget_metrics", "rounds_of"]


def rounds_of(given: int | None, started: int | None) -> int:
    """Return the number of rounds over which a budget is spread.

    Parameters
    ----------
    given : int, optional
        The strategy's option `rounds`.
    started : int, optional
        The rounds of `start`; None if the user's own `start` runs the rounds.

    Raises
    ------
    InvalidParameterError
        If neither is known.
    """
    rounds = given or started
    if rounds is None:
        allowed = "the rounds to spread the budget over, under your own start"
        raise InvalidParameterError("rounds", rounds, allowed)
    return rounds


def budget_metrics(card: PrivacyCard) -> dict[str, float]:
    """Return the epsilon that the client with the most charges has spent, and what it has left."""
    spent, cap = card.guarantee.spent, card.guarantee.epsilon
    if spent is None or cap is None:
        return {}
    return {"epsilon": spent, "epsilon_left": max(0.0, cap - spent)}
