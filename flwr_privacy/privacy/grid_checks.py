"""Refuses grids that are too coarse for the noise, or too fine for codes of 32 bits."""

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.grid import CODE_LIMIT

__all__ = ["check_codes", "check_gap"]


def check_gap(grid: int, gap: float, *, charged: float) -> None:
    """Refuse a grid on which the noise of a release costs more than is charged for it.

    Raises
    ------
    InvalidParameterError
        If it does.
    """
    if gap > charged:
        allowed = (
            f"a finer grid (more grid_bits): epsilon {gap:.3g} of a release would be lost to it"
        )
        raise InvalidParameterError("grid", grid, allowed)


def check_codes(grid: int, largest: float) -> None:
    """Refuse a grid on which codes leave 32 bits.

    Raises
    ------
    InvalidParameterError
        If they do.
    """
    if largest > CODE_LIMIT:
        allowed = f"a coarser grid (less grid_bits): codes up to {largest:.3g} leave 32 bits"
        raise InvalidParameterError("grid", grid, allowed)
