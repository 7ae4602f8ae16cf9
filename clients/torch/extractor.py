"""A frozen torch model as a feature map: a linear regression on top of it is its last layer."""

import copy
import hashlib
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_privacy.errors import DataError, InvalidParameterError, check_number

from .computing import allotted_device, one_thread

__all__ = ["FrozenExtractor"]

_BATCH = 512  # records


class FrozenExtractor:
    """Wraps a frozen torch module as a feature map for linear regression.

    ACFL regresses the labels on them in place of raw data, which fits the last layer of a network
    whose other layers are public: pretrained on public data, or random. What is guaranteed then
    covers features, not pixels: one pixel moves them all.

    Parameters
    ----------
    module : nn.Module
        Maps (batch, ...) float32 to (batch, d). It is copied, and the copy evaluated as it is: with
        the statistics that its normalisation layers have, without dropout. It must make the
        features of a record from that record alone.
    identity : str
        Name of its architecture, which the weights do not tell. Clients and server compare
        `identity`, which is this name with the bounds and a digest of the weights.
    bound : float, optional
        Features are clipped to ``[-bound, bound]``, above 0; by default tanh takes them to
        ``[-1, 1]``.
    norm : float, optional
        Then a record's features are shortened to this L2 norm, above 0, if they are longer; by
        default they are not. The noise that protects a record grows with the norm.

    Attributes
    ----------
    identity : str
        What tells this map from any other.
    bound : float
        Bound of the absolute value of a feature.
    norm : float or None
        Bound of the L2 norm of a record's features.

    Raises
    ------
    InvalidParameterError
        If the identity is empty, or a bound is not above 0.

    Examples
    --------
    >>> from flwr_privacy.clients.torch import initialise, mlp
    >>> extractor = FrozenExtractor(initialise(lambda: mlp([4, 8]), 0), identity="mlp 4-8")
    >>> extractor.identity.startswith("mlp 4-8 tanh ")
    True
    >>> extractor(np.zeros((3, 2, 2), np.float32)).shape
    (3, 8)
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        identity: str,
        bound: float | None = None,
        norm: float | None = None,
    ) -> None:
        if not isinstance(identity, str) or not identity:
            raise InvalidParameterError("identity", identity, "a name")
        for name, value in (("bound", bound), ("norm", norm)):
            if value is not None:
                check_number(name, value, minimum=math.ulp(0.0))
        self._module = copy.deepcopy(module).eval().requires_grad_(False)
        self._clips = bound is not None
        self.bound = 1.0 if bound is None else float(bound)
        self.norm = None if norm is None else float(norm)
        limits = "tanh" if bound is None else f"bound={self.bound!r}"
        limits += "" if norm is None else f" norm={self.norm!r}"
        self.identity = f"{identity} {limits} {_digest(module)}"

    def __call__(self, raw: NDArray[Any]) -> NDArray[np.float64]:
        """Return the features of some records, (m, d) float64.

        Parameters
        ----------
        raw : ndarray, shape (m, ...)
            Records as the module takes them; they are cast to float32.

        Raises
        ------
        DataError
            If there are no records, or a feature is not finite.
        InvalidParameterError
            If the module does not return one row for each record.
        """
        if len(raw) == 0:
            raise DataError("there are no records to make features of")
        table = self._output(raw)
        if not np.isfinite(table).all():
            raise DataError("a feature is not finite: the module, or what it was given, is unfit")
        # In float64: rounding to float32 could pass a bound by more than the client allows.
        table = np.clip(table, -self.bound, self.bound) if self._clips else np.tanh(table)
        if self.norm is not None:
            lengths = np.linalg.norm(table, axis=1, keepdims=True)
            table *= self.norm / np.maximum(lengths, self.norm)
        return table

    def _output(self, raw: NDArray[Any]) -> NDArray[np.float64]:
        device = allotted_device()
        module = self._module.to(device)
        blocks = []
        with one_thread(), torch.no_grad():
            for start in range(0, len(raw), _BATCH):
                block = np.array(raw[start : start + _BATCH], dtype=np.float32)
                made = module(torch.from_numpy(block).to(device))
                if made.ndim != 2 or len(made) != len(block):
                    shape = f"a module from {block.shape} to {tuple(made.shape)}"
                    raise InvalidParameterError("module", shape, "one row for each record")
                blocks.append(made.cpu().double().numpy())
        return np.concatenate(blocks)


def _digest(module: nn.Module) -> str:
    """Return a digest of all parameters and buffers with their names, types and shapes."""
    digest = hashlib.sha256()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
