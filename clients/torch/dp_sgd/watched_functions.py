"""What a private loop may not compute with torch, or not in a rehearsal, as it calls it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flwr_privacy.errors import FlwrPrivacyError, InvalidParameterError, ProtocolError

__all__ = ["WatchedFunctions"]

_DROPOUTS = frozenset(
    {
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        torch.dropout,
    }
)
_LOSSES = frozenset({functional.cross_entropy, functional.nll_loss})
_IGNORED = -100  # by default


class WatchedFunctions(TorchFunctionMode):
    """Watches what a loop does with one batch.

    The mean of a classification loss divides by the weights of the classes, or the number of
    targets that are not ignored: by something of other records. Classes in the targets show which
    loss is such a mean, and only real targets show what is ignored.

    In a rehearsal nothing is dropped: the gradient of a record is compared in two batches.

    Parameters
    ----------
    records : int
        Number of records in the batch.
    refused : callable
        Raises an error of the library.
    rehearsing : bool
        Whether this is a rehearsal.
    """

    def __init__(
        self, records: int, *, refused: Callable[[FlwrPrivacyError], None], rehearsing: bool
    ) -> None:
        super().__init__()
        self._records, self._refused, self._rehearsing = records, refused, rehearsing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOSSES:
            self._check(*args, **kwargs)
        elif self._rehearsing and func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        elif self._rehearsing and func is functional.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]), {**kwargs}
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)

    def _check(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = _IGNORED,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        """Refuse a mean that divides by something of several records."""
        if reduction != "mean" or reduce is False or size_average is False:
            return
        if not input.requires_grad:  # nothing is learned from it: some validation
            return
        single = (
            'the losses of single records: reduction="none", then a mean over each, then .mean()'
        )
        if weight is not None:
            self._refused(InvalidParameterError("weight", "one of classes under a mean", single))
        if target.is_floating_point():  # a distribution for each record
            return
        if target.numel() > self._records:
            given = "a mean over several targets of each record, of which some may be ignored"
            self._refused(InvalidParameterError("reduction", given, single))
        if bool((target == ignore_index).any()):
            self._refused(ProtocolError(f"a mean with ignored targets: expected {single}"))
