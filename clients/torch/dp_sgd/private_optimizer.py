"""The optimiser that a private training loop gets: the user's own, with private steps."""

from typing import Any

from torch.optim import Optimizer

from flwr_privacy.errors import InvalidParameterError, ProtocolError

from .private_loop import PrivateLoop

__all__ = ["PrivateOptimizer"]


class PrivateOptimizer(Optimizer):
    """The user's optimiser, whose steps get noised sums of clipped gradients.

    Schedulers take it as they take the optimiser itself.

    Parameters
    ----------
    inner : Optimizer
        The user's.
    loop : PrivateLoop
        The training.
    """

    def __init__(self, inner: Optimizer, loop: PrivateLoop) -> None:
        # Not the base's: parameters, settings and state are the inner one's.
        self.inner, self._loop = inner, loop

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The settings of the user's optimiser."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the user's optimiser: it follows from noised sums."""
        return self.inner.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """The default settings of the user's optimiser."""
        return self.inner.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a private step on the batch that the loader gave last.

        Raises
        ------
        InvalidParameterError
            With a closure, which would go through a batch more than once.
        ProtocolError
            See `PrivateLoop.step`.
        """
        with self._loop.telling():
            if closure is not None:
                allowed = "nothing: one backward pass for each batch"
                raise InvalidParameterError("closure", closure, allowed)
            self._loop.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the batch, and of its records."""
        self.inner.zero_grad(set_to_none=set_to_none)
        self._loop.hooks.clear()

    def add_param_group(self, param_group: Any) -> None:
        """Refuse further parameters.

        Raises
        ------
        ProtocolError
            Always: what the noise is for is known before the training.
        """
        with self._loop.telling():
            raise ProtocolError("further parameters in the loop: the optimizer needs all at first")

    def state_dict(self) -> Any:
        """Return the state of the user's optimiser."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Refuse another state.

        Raises
        ------
        ProtocolError
            Always: its moments may be of gradients without noise. So is a state that is loaded into
            the inner optimiser, at the next step.
        """
        with self._loop.telling():
            raise ProtocolError("load_state_dict in the loop: moments may be without noise")

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.inner!r})"
