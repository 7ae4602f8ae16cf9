"""The error for a scheme that does not fit an app."""

from collections.abc import Sequence

from flwr_privacy.errors import DeclinedError

__all__ = ["UnfitError"]


class UnfitError(DeclinedError):
    """A scheme does not fit an app, or the change cannot be made safely.

    Parameters
    ----------
    reason : str
        Why.
    by_hand : sequence of str
        What to change by hand.
    """

    def __init__(self, reason: str, by_hand: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.by_hand = tuple(by_hand)
        for line in by_hand:
            self.add_note(f"by hand: {line}")
