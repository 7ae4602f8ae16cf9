"""Chooses how the noise of the rounds goes together, where the user leaves it open."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from flwr_privacy.central_dp.correlated.options import BLT, BandedMF, CorrelatedNoise
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.cohorts import BALANCED, CYCLIC_POISSON
from flwr_privacy.wire.arrays import Arrays

from .model_noise import ModelNoise
from .plan import CentralDPNoisePlan
from .sensitivity import SERVER

__all__ = ["CANDIDATES", "LEAST_GAIN", "MOST_KEPT", "NoiseChoice", "choose"]

CANDIDATES: tuple[CorrelatedNoise, ...] = (BandedMF(), BLT())
"""From the least noise to the least memory; a `BLT` has a few percent more noise."""

MOST_KEPT = 500_000_000
"""Bytes that the noise of earlier rounds may take in the server's memory and in a checkpoint."""

LEAST_GAIN = 0.05
"""By how much the noise multiplier must be less at least, to be worth the state that is kept."""


@dataclass(frozen=True, kw_only=True)
class NoiseChoice:
    """What was chosen, and why.

    Parameters
    ----------
    plan : CentralDPNoisePlan
        The noise of the training.
    text : str
        The choice and its reason, for users.
    """

    plan: CentralDPNoisePlan
    text: str


def choose(
    plan: CentralDPNoisePlan,
    model: Arrays,
    *,
    clipping_norm: float,
    grid_bits: int | None = None,
    keep_back: Collection[str] = (),
    inner: bool = False,
) -> NoiseChoice:
    """Return the plan with correlated noise if that is possible and pays, else as it is.

    Unit, adversary, neighbours and budget stay those of the plan. The first of `CANDIDATES` is
    taken whose state takes at most `MOST_KEPT` bytes, whose noise can be drawn exactly on the
    plan's grid, and whose `CentralDPNoisePlan.effective_multiplier` is at least `LEAST_GAIN` below
    that of independent noise.

    Parameters
    ----------
    plan : CentralDPNoisePlan
        The training, with independent noise.
    model : Mapping of str to ndarray
        The model that is trained.
    clipping_norm, grid_bits, keep_back
        As in `CentralDPNoisePlan.terms`.
    inner : bool, default False
        Whether another strategy makes the model from the rounds' means. What correlated noise makes
        small is the error of their plain sum, so it is left out then.
    """
    if reason := _impossible(plan, inner=inner):
        return _independent(plan, reason)
    reason = ""
    for candidate in CANDIDATES:
        correlated = replace(plan, correlated=candidate)
        terms = correlated.terms(clipping_norm, grid_bits=grid_bits, keep_back=keep_back)
        assert correlated.joint is not None  # it has a candidate
        released = {name: model[name] for name in terms.names(model)}
        noise = ModelNoise(correlated.joint.factor, released)
        if correlated.effective_multiplier > (1 - LEAST_GAIN) * plan.effective_multiplier:
            return _independent(plan, f"correlated noise would not be {LEAST_GAIN:.0%} less")
        if noise.kept_bytes > MOST_KEPT:
            reason = (
                f"the state of correlated noise would take {noise.kept_bytes / 1e6:,.0f} MB, above "
                f"the {MOST_KEPT / 1e6:,.0f} MB up to which it is the default"
            )
            continue
        try:
            noise.check(terms)
        except InvalidParameterError as error:
            reason = f"correlated noise cannot be drawn on this grid ({error})"
            continue
        return NoiseChoice(plan=correlated, text=correlated.text())
    return _independent(plan, reason)


def _impossible(plan: CentralDPNoisePlan, *, inner: bool) -> str:
    """Return why there is no correlated noise for a training; "" if there is."""
    if plan.noise != SERVER:
        return "correlated noise needs a server that adds it"
    if plan.sampling not in (BALANCED, CYCLIC_POISSON):
        return (
            "correlated noise needs clients that rest between two rounds, and so sampling = "
            f"'{BALANCED}' or '{CYCLIC_POISSON}'"
        )
    if plan.count_share:
        return "correlated noise needs a clipping norm that does not change"
    if inner:
        return "an inner strategy makes the model, which is no plain sum of the rounds"
    return ""


def _independent(plan: CentralDPNoisePlan, reason: str) -> NoiseChoice:
    return NoiseChoice(plan=plan, text=f"the noise of the rounds is independent: {reason}")
