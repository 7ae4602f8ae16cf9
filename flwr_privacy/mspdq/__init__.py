"""MSP and MSPDQ: models split into sub-states, mixed by consensus, on codes of a few bits.

"A Novel Privacy Enhancement Scheme with Dynamic Quantization for Federated Learning". After local
training a client does not upload its model. It uploads a disturbed copy, keeps a hidden rest that
makes up for it, and mixes for K more steps with the server's averages, in which the disturbance
cancels. MSPDQ sends codes of B bits in these steps, on intervals that follow the values and shrink.

**Guarantee.** Splitting alone protects nothing against the server, nor against whoever reads a
client's messages: two of them give the model away
(`flwr_privacy.simulations.research.mspdq.consensus`). The paper's Theorem 1 needs couplings and
consensus weights that no party uses. Rounding to B bits leaves the server an estimate of the model
whose error is a few percent of the update, and with intervals as narrow as the default ones a
fraction of one. Run under a secure sum, MSPDQ opens the sums of the codes and nothing else: then a
client's model is protected as the secure sum says, and what the averages W[0], ..., W[K] tell is
not.
"""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from .codec import Codec, DecodedSum, centred, decode_start, encode_start
    from .hub import Hub, SumHub, code_sum, outweighs
    from .intervals import (
        Intervals,
        Widths,
        min_levels_linf,
        own_width,
        pi_paper,
        spread_gain,
        width_linf,
        widths_for_bound,
    )
    from .member import Member
    from .mixing import Mixing, SubStates
    from .splitting import NoiseSplit, UniformSplit, noised
    from .terms import CODES, MIX, SYNC, MSPTerms
    from .theory import (
        lambda_min_U,
        laplace_scale,
        largest_stable,
        max_coupling,
        residual,
        rounds_needed,
    )
    from .theory_steps import TheorySteps
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "CODES",
    "MIX",
    "SYNC",
    "Codec",
    "DecodedSum",
    "Hub",
    "Intervals",
    "MSPTerms",
    "Member",
    "Mixing",
    "NoiseSplit",
    "SubStates",
    "SumHub",
    "TheorySteps",
    "UniformSplit",
    "Widths",
    "centred",
    "code_sum",
    "decode_start",
    "encode_start",
    "lambda_min_U",
    "laplace_scale",
    "largest_stable",
    "max_coupling",
    "min_levels_linf",
    "noised",
    "outweighs",
    "own_width",
    "pi_paper",
    "residual",
    "rounds_needed",
    "spread_gain",
    "width_linf",
    "widths_for_bound",
]
