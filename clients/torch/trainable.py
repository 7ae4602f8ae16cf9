"""Trains a part of a torch model: adapters, a head. The rest is frozen and never travels."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flwr_privacy.clients.certificates.frozen_weights import LoadedModel, current_frozen
from flwr_privacy.clients.node.rehearsal import model_loaded
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.wire.arrays import array_digest

__all__ = [
    "freeze_lora_factor",
    "load_trainable",
    "note_step",
    "trainable_names",
    "trainable_state",
]

_FACTORS = ("A", "B")


def trainable_names(model: nn.Module) -> list[str]:
    """Return the names of what a training of the model changes, for ``trainable`` of a strategy.

    They are the parameters whose ``requires_grad`` is on, and the buffers of modules that have such
    a parameter of their own, as the statistics of a normalisation layer that is trained.

    Parameters
    ----------
    model : Module
        The model, with its adapters.

    Returns
    -------
    list of str
        Names in the order of ``state_dict``.

    Raises
    ------
    InvalidParameterError
        If nothing is trained.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> _ = model[0].requires_grad_(False)
    >>> trainable_names(model)
    ['1.weight', '1.bias']
    """
    trained = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules(remove_duplicate=False)
        if any(p.requires_grad for p in module.parameters(recurse=False))
        for name in _own_names(module)
    }
    names = [name for name in model.state_dict() if name in trained]
    if not names:
        allowed = "a model with parameters whose requires_grad is on"
        raise InvalidParameterError("model", type(model).__name__, allowed)
    return names


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the part of ``state_dict`` that a training changes, as `trainable_names` has it.

    A Message-API app replies with ``ArrayRecord(trainable_state(model))``, a NumPyClient with
    ``[tensor.cpu().numpy() for tensor in trainable_state(model).values()]``.
    """
    state = model.state_dict()
    return {name: state[name] for name in trainable_names(model)}


def load_trainable(model: nn.Module, arrays: Mapping[str, Any] | Sequence[NDArray[Any]]) -> None:
    """Copy the server's arrays into the trained part of a model; call it first in a training.

    It takes the place of ``load_state_dict`` where the server has ``trainable=...``. In a scheme's
    round it also checks that the rest of the model is that of the server, and in the rehearsal
    before the first round that everything which is to be trained can be.

    Parameters
    ----------
    model : Module
        The model, with its adapters; ``requires_grad`` is on for what is trained and for nothing
        else.
    arrays : Mapping of str to Array or ndarray, or sequence of ndarray
        The arrays that came: the ArrayRecord of a message, or the list that ``fit`` of a
        NumPyClient gets, in the order of `trainable_names`.

    Raises
    ------
    InvalidParameterError
        If they are others than what `requires_grad` says, or of another shape; or the frozen
        weights are not those of the server's model. The model is then as it was.

    Guarantee
    ---------
    Adversary: a server that names other weights to train, or another base model, for some clients
    or in some round. The node trains what its own app marks with ``requires_grad``, from its own
    base model, or refuses. Covered: names, shapes, types and values of all arrays in ``state_dict``
    before the training, and of the frozen ones after it. Not covered: what the app itself does with
    another model than the one it gives to this function; tensors that are not in ``state_dict``.

    Notes
    -----
    bfloat16 and float8, which NumPy lacks, are compared by their values in float32: a server may
    hold such weights in float32.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> _ = model[0].requires_grad_(False)
    >>> load_trainable(model, {"1.weight": np.ones((1, 3)), "1.bias": np.zeros(1)})
    >>> model[1].weight.tolist()
    [[1.0, 1.0, 1.0]]
    """
    try:
        _load(model, arrays)
    except InvalidParameterError as error:
        model_loaded(error)
        raise
    model_loaded()


def freeze_lora_factor(model: nn.Module, factor: str = "A") -> list[str]:
    """Freeze one factor of every LoRA adapter: FFA-LoRA.

    Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024: the update of
    a layer is ``B A``; with a random A that stays as it is, only B travels. That is half of the
    values (for square layers), the mean of the clients' updates is the update of the mean, and
    noise is not multiplied by noise.

    Draw A from the same seed on the server and on every node, e.g. by
    `flwr_privacy.clients.torch.initialise`: it is a frozen weight then, and has to be the same.

    Parameters
    ----------
    model : Module
        A model with adapters of ``peft``, whose factors are called ``lora_A`` and ``lora_B``
        (``lora_embedding_A`` and ``lora_embedding_B`` of embeddings).
    factor : {"A", "B"}, default "A"
        Which factor. B is zero in a new adapter: with it frozen nothing would be learned.

    Returns
    -------
    list of str
        The parameters that are frozen now.

    Raises
    ------
    InvalidParameterError
        If the model has no such adapters, or the other factor of one is zero and stays so.
    """
    if factor not in _FACTORS:
        raise InvalidParameterError("factor", factor, f"one of {_FACTORS}")
    marks = {f"lora_{factor}", f"lora_embedding_{factor}"}
    frozen = {n: p for n, p in model.named_parameters() if marks.intersection(n.split("."))}
    if not frozen:
        allowed = f"a model with adapters of peft: parameters under {sorted(marks)}"
        raise InvalidParameterError("model", type(model).__name__, allowed)
    if zero := [name for name, p in frozen.items() if not bool(p.detach().any())]:
        allowed = "a factor that is not zero: the product would stay zero, whatever is trained"
        raise InvalidParameterError(f"lora_{factor} of {zero[0]}", 0.0, allowed)
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    return list(frozen)


def note_step(parameters: Iterable[Tensor]) -> None:
    """Tell the scheme's round, if there is one, which parameters an optimiser has in a step."""
    request = current_frozen()
    if request is not None:
        request.step(map(id, parameters))


def _note_optimizer(optimizer: Any, arguments: Any, named: Any) -> None:
    if current_frozen() is not None:
        note_step(p for group in optimizer.param_groups for p in group["params"])


# For all optimisers: those of a user's training are not known here. Outside of a scheme's round
# with frozen weights it does nothing.
register_optimizer_step_pre_hook(_note_optimizer)


def _own_names(module: nn.Module) -> list[str]:
    parameters = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
    return parameters + [name for name, _ in module.named_buffers(recurse=False)]


def _load(model: nn.Module, arrays: Mapping[str, Any] | Sequence[NDArray[Any]]) -> None:
    names = trainable_names(model)
    named = arrays if isinstance(arrays, Mapping) else dict(zip(names, arrays, strict=False))
    if named is not arrays and len(arrays) != len(names):
        allowed = f"{len(names)}, one for each array that the model trains: {names}"
        raise InvalidParameterError("the number of arrays", len(arrays), allowed)
    state = model.state_dict(keep_vars=True)
    _check_names(state, names, named)
    values = {name: _values(array) for name, array in named.items()}
    for name, value in values.items():
        if value.shape != tuple(state[name].shape):
            raise InvalidParameterError(
                f"arrays[{name!r}]",
                f"shape {value.shape}",
                f"shape {tuple(state[name].shape)}: the rank of an adapter, or the size of a head, "
                "is another than on the server",
            )
    request = current_frozen()
    if request is not None:
        request.load(_loaded(model, names))
    with torch.no_grad():
        for name, value in values.items():
            state[name].copy_(torch.from_numpy(np.array(value, order="C")))


def _check_names(state: Mapping[str, Tensor], names: list[str], arrays: Mapping[str, Any]) -> None:
    """Refuse arrays that are not what the model trains."""
    if unknown := [name for name in arrays if name not in state]:
        raise InvalidParameterError(
            "arrays",
            unknown,
            f"names of the model: {list(state)}. Put the adapters into the model before",
        )
    if off := [name for name in arrays if name not in names]:
        raise InvalidParameterError(
            f"requires_grad of {off}",
            False,
            "True: the server has them trained. Switch it on, or leave them out of trainable",
        )
    if kept := [name for name in names if name not in arrays]:
        raise InvalidParameterError(
            f"requires_grad of {kept}",
            True,
            "False: the server does not send them, and what is trained there would be lost. Switch "
            "it off, or name them in trainable",
        )


def _loaded(model: nn.Module, names: list[str]) -> LoadedModel:
    state = model.state_dict(keep_vars=True)
    trained = {n: state[n] for n in names if isinstance(state[n], nn.Parameter)}

    def frozen() -> dict[str, bytes]:
        rest = {name: t for name, t in model.state_dict().items() if name not in names}
        return {name: array_digest(_comparable(tensor)) for name, tensor in rest.items()}

    return LoadedModel(
        frozen,
        {name: id(parameter) for name, parameter in trained.items()},
        lambda: {name for name, parameter in trained.items() if parameter.grad is not None},
    )


def _comparable(tensor: Tensor) -> NDArray[Any]:
    """Return the values of a tensor, in float32 where NumPy lacks its type."""
    if not isinstance(tensor, Tensor):  # a module may put other things into its state
        raise InvalidParameterError("state_dict", type(tensor).__name__, "tensors")
    if tensor.is_floating_point() and tensor.dtype not in _NUMPYS:
        tensor = tensor.float()
    values: NDArray[Any] = tensor.detach().cpu().numpy()
    return values


_NUMPYS = (torch.float16, torch.float32, torch.float64)


def _values(array: Any) -> NDArray[Any]:
    if isinstance(array, Array):
        array = array.numpy()
    elif isinstance(array, Tensor):
        array = array.detach().cpu().numpy()
    values: NDArray[Any] = np.asarray(array)
    return values
