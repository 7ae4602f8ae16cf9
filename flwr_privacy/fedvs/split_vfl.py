"""The messages of plain vertical split learning, in which the server sees embeddings.

The systems that "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for
Split Models" (ICML 2023), section 6.1, compares with.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import check_integer, check_number
from flwr_privacy.privacy.noise import discrete_laplace
from flwr_privacy.privacy.randomness import SecureRandom

__all__ = ["EmbeddingRequest", "noisy"]

_STEPS = 2.0**12  # of the noise's grid in its scale


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest:
    """The request for embeddings.

    Parameters
    ----------
    training, session : str
        Names of the training, and of the server's run, which is another one after a resume.
    update : int
        Number of gradients for this client up to now, the one that comes along included.
    learning_rate : float
        Step size of that gradient.
    trained_rows : list of int
        Its rows, as places in the common order; empty if none comes.
    trained_clients : list of str
        Whose embeddings it is of: others leave it out.
    divisor : int
        Over how many clients its aggregate is a mean; 1 for a sum.
    part : str
        Part of the rows that are asked for.
    rows : list of int
        Those rows; empty for all.
    order, bias, x_max, embedding
        As of `flwr_privacy.fedvs.terms.CodeTerms`.
    epsilon : float
        Of the noise on the embeddings; 0 for none.
    clip : float
        Bound to which they are cut before; 0 for none.
    """

    training: str
    session: str
    update: int
    learning_rate: float
    trained_rows: list[int]
    trained_clients: list[str]
    divisor: int
    part: str
    rows: list[int]
    order: int
    bias: bool
    x_max: float
    embedding: int
    epsilon: float
    clip: float

    def check(self) -> None:
        """Check the values that can be checked without the data.

        Raises
        ------
        InvalidParameterError
            If a value is out of range.
        """
        check_integer("divisor", self.divisor, minimum=1)
        check_integer("order", self.order, minimum=1, maximum=64)
        check_integer("embedding", self.embedding, minimum=1, maximum=2**20)
        for name in ("learning_rate", "x_max", "epsilon", "clip"):
            check_number(name, getattr(self, name), minimum=0)


def noisy(
    embedding: NDArray[np.float64], *, epsilon: float, clip: float, random: SecureRandom
) -> NDArray[np.float64]:
    """Return embeddings with Laplace noise of scale ``spread / epsilon`` on each entry.

    Parameters
    ----------
    embedding : (b, h) float64
        The embeddings.
    epsilon : float
        What the noise is scaled by, above 0.
    clip : float
        Bound to which entries are cut; their spread is twice that. With 0 they are not cut, and the
        spread is that of the batch.
    random : SecureRandom
        Where the noise comes from.

    Notes
    -----
    No guarantee: an embedding has h entries, a client sends them in every round, and a spread that
    is taken from the data says something of them. The paper states neither law nor sensitivity.

    Examples
    --------
    >>> noisy(np.ones((2, 3)), epsilon=5.0, clip=0.0, random=SecureRandom()).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    if clip > 0:
        embedding = np.clip(embedding, -clip, clip)
    scale = (2 * clip if clip > 0 else float(np.ptp(embedding))) / epsilon
    if scale == 0:
        return embedding
    drawn = discrete_laplace(embedding.size, _STEPS, random).reshape(embedding.shape)
    return embedding + drawn * (scale / _STEPS)
