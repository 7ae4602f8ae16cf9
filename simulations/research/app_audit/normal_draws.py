"""Turns off what an app draws from normal and Laplace distributions, to see where that noise goes.

Canaries replace the app's own function. Noise that this function adds is then lost, and nothing
that canaries show would speak against a promise that rests on it.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["NormalDraws"]

_NUMPY = ("normal", "standard_normal", "randn", "laplace")
_PYTHON = ("gauss", "normalvariate")
_TORCH = ("normal", "randn", "randn_like")


class NormalDraws:
    """The draws of NumPy, torch and Python, from when this is made on, which is before the app is.

    Noise that is made of uniform draws, or by other libraries, is not found.
    """

    def __init__(self) -> None:
        import torch

        self._silent = False
        for owner, names in ((np.random, _NUMPY), (random, _PYTHON), (torch, _TORCH)):
            for name in names:
                setattr(owner, name, self._stoppable(getattr(owner, name)))
        torch.Tensor.normal_ = self._stoppable(torch.Tensor.normal_)  # type: ignore[method-assign]
        generator = _generator(self._stoppable)
        plain = np.random.default_rng

        def default_rng(seed: Any = None) -> np.random.Generator:
            return generator(plain(seed).bit_generator)

        np.random.default_rng = default_rng

    @contextmanager
    def from_one_state(self, *, silent: bool) -> Iterator[None]:
        """Begin with the generators as they are, and leave them so; have all draws be 0."""
        import torch

        states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self._silent = silent
        try:
            yield
        finally:
            self._silent = False
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
            torch.set_rng_state(states[2])

    def _stoppable(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            found = draw(*args, **kwargs)  # in any case: later draws are to be the same
            if not self._silent:
                return found
            return found.zero_() if hasattr(found, "zero_") else found * 0.0

        return drawn


def _generator(stoppable: Callable[..., Any]) -> type[np.random.Generator]:
    names = ("normal", "standard_normal", "laplace")
    plain = np.random.Generator
    methods = {name: stoppable(getattr(plain, name)) for name in names}
    return type("Generator", (plain,), methods)
