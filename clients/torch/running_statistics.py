"""Finds the arrays of a torch model that are statistics, so that an app can keep them back."""

from torch import nn

__all__ = ["statistics_of"]


def statistics_of(model: nn.Module, *, positions: bool = False) -> list[str]:
    """Return the arrays of a model that no gradient trains, for ``keep_back`` of a strategy.

    They are the buffers in its ``state_dict``: the running means and variances of normalisation
    layers with their counters of batches, and whatever else a module registers as a buffer.

    Parameters
    ----------
    model : Module
        The model.
    positions : bool, default False
        Whether they are called by their place in ``state_dict`` ("0", "1", ...), as arrays are that
        came as a list: those of a NumPyClient app, which sends
        ``[tensor.numpy() for tensor in model.state_dict().values()]``. By default they have the
        names of ``state_dict``.

    Returns
    -------
    list of str
        Names in the order of ``state_dict``; empty if the model has no buffers.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> statistics_of(model)
    ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    >>> statistics_of(model, positions=True)
    ['4', '5', '6']
    """
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [
        str(place) if positions else name
        for place, name in enumerate(model.state_dict())
        if name not in weights
    ]
