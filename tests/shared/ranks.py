"""Ranks over the field of a prime, by galois."""

import galois
import numpy as np
from numpy.typing import NDArray


def rank_mod_p(rows: NDArray[np.integer], p: int) -> int:
    """Return the rank of integers modulo a prime."""
    return int(np.linalg.matrix_rank(galois.GF(p)(rows % p)))
