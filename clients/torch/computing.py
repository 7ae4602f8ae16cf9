"""Sets torch's device, threads and loss."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["Loss", "allotted_device", "one_thread", "raise_resource_error"]

Loss = Callable[[Any, Tensor], Tensor]
"""From the model's output for a batch and the batch of its labels to the (mean) loss."""


def allotted_device() -> str:
    """Return ``"cuda"`` where a GPU was allotted to this process, else ``"cpu"``.

    Ray sets ``CUDA_VISIBLE_DEVICES`` to nothing for a client without a share of a GPU.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return "cuda" if torch.cuda.is_available() and not hidden else "cpu"


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use a single thread of the CPU: the order of a sum depends on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def raise_resource_error(error: Exception) -> None:
    """Raise an error again if it says that memory or a device is lacking.

    Any other error of a model or a loss may be due to the records that they were given.
    """
    lost = getattr(torch, "AcceleratorError", ())  # new in torch 2.8
    # On a CPU torch has no type of its own for it. A device is lost after a kernel's assertion.
    signs = ("DefaultCPUAllocator", "CUDA error")
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, lost)) or (
        type(error) is RuntimeError and any(sign in str(error) for sign in signs)
    ):
        raise error
