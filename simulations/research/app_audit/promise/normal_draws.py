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
_GENERATOR = ("normal", "standard_normal", "laplace")


class NormalDraws:
    """The draws of NumPy, torch and Python, from when this is made on, which is before the app is.

    Draws after the app set a seed are left as they are: that is how synthetic data are made, and
    noise that comes out the same each time protects nobody. Noise that is made of uniform draws, or
    by other libraries, is not found.
    """

    def __init__(self) -> None:
        import torch

        self._silent = False
        self._seeded: set[Any] = set()
        drawn = ((np.random, _NUMPY, "seed"), (random, _PYTHON, "seed"))
        for owner, names, seed in (*drawn, (torch, _TORCH, "manual_seed")):
            for name in names:
                setattr(owner, name, self._stoppable(getattr(owner, name), owner))
            setattr(owner, seed, self._noting(getattr(owner, seed), owner))
        tensor: Any = torch.Tensor
        tensor.normal_ = self._stoppable(tensor.normal_, torch)
        plain = np.random.Generator
        stopped = {name: self._stoppable(getattr(plain, name), plain) for name in _GENERATOR}
        generator: Any = type("Generator", (plain,), stopped)
        made = np.random.default_rng

        def default_rng(seed: Any = None) -> np.random.Generator:
            found: np.random.Generator = (
                generator(made().bit_generator) if seed is None else made(seed)
            )
            return found

        np.random.default_rng = default_rng

    @contextmanager
    def from_one_state(self, *, silent: bool) -> Iterator[None]:
        """Begin with the generators as they are, and leave them so; have all draws be 0."""
        import torch

        states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self._silent = silent
        self._seeded.clear()
        try:
            yield
        finally:
            self._silent = False
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
            torch.set_rng_state(states[2])

    def _noting(self, seed: Callable[..., Any], owner: Any) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._seeded.add(owner)
            return seed(*args, **kwargs)

        return noted

    def _stoppable(self, draw: Callable[..., Any], owner: Any) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            found = draw(*args, **kwargs)  # in any case: later draws are to be the same
            if not self._silent or owner in self._seeded:
                return found
            return found.zero_() if hasattr(found, "zero_") else found * 0.0

        return drawn
