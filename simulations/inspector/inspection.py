"""Inspects an app for a scheme: whether it fits, what changes, what is lost, what to expect."""

from dataclasses import dataclass, replace

from .app_folder import AppFolder
from .arrays import Arrays, arrays_of
from .changes.change import Change, change_of
from .changes.loading_change import loads
from .changes.wrapper_change import unwrapped
from .client_half import client_half
from .findings import losses
from .foresight import forecast_of
from .unfit import UnfitError, check_fits
from .wraps import BRING_THEIR_CLIENT, FEWEST_CLIENTS, Options, Wrap, wrap_of

__all__ = ["Inspection", "inspect_app"]

NOT_RUN = "nothing of the app was run"


@dataclass(frozen=True)
class Inspection:
    """What a scheme means for an app.

    Parameters
    ----------
    wrap : Wrap
        The scheme as it goes around the app.
    found : Arrays or str
        What the app's server starts from, or why that is not known.
    clients : int
        The number of clients.
    change : Change
        What changes in the app.
    losses : tuple of str
        What the scheme takes from the app, refuses or passes on unprotected.
    forecast : str
        Whether the model can learn; "" where the scheme adds no noise or the arrays are not known.
    """

    wrap: Wrap
    found: Arrays | str
    clients: int
    change: Change
    losses: tuple[str, ...]
    forecast: str


def check_trainable(found: Arrays | None, wrap: Wrap) -> None:
    """Refuse a model whose layers mix the records, where a scheme protects the single ones.

    Raises
    ------
    UnfitError
        If it is one.
    """
    mixed = [] if found is None else [a.name for a in found.arrays if a.is_statistic or a.suspected]
    if wrap.trainer and mixed:
        raise UnfitError(
            "where single records are protected no layer may mix the records, and these arrays are "
            f"running statistics of layers that do: {', '.join(mixed)}",
            ["replace batch normalisation by GroupNorm or LayerNorm, or leave out --unit"],
        )


def inspect_app(app: AppFolder, scheme: str, options: Options, *, run: bool = True) -> Inspection:
    """Inspect an app for a scheme; nothing is trained, and nothing of the app changes.

    Parameters
    ----------
    app : AppFolder
        The app.
    scheme : str
        The scheme's name.
    options : Options
        What is chosen beside it. Without a number of clients that of the app's federation counts,
        or the fewest with which its server begins.
    run : bool, default True
        Whether the app's server is run up to its first round, to find its arrays.

    Raises
    ------
    InvalidParameterError
        If an option is not allowed, or the app's halves are not found.
    UnfitError
        If the scheme does not fit the app, or the change cannot be made safely.
    """
    if scheme in BRING_THEIR_CLIENT:
        raise UnfitError(BRING_THEIR_CLIENT[scheme])
    plain = unwrapped(app, wrap_of(scheme, options))
    check_fits(plain.app, plain.wrap)
    found = arrays_of(app) if run else NOT_RUN
    known = found if isinstance(found, Arrays) else None
    check_trainable(known, wrap_of(scheme, options))
    fewest = FEWEST_CLIENTS if known is None else known.min_available_nodes
    clients = options.clients or app.nodes or fewest
    wrap = wrap_of(scheme, replace(options, clients=clients))
    wrap = wrap if known is None else wrap.keeping_back(known.suspected)
    # Where the app's lines that load the model are not found, it goes on with the whole model.
    if known is not None and known.adapters and wrap.takes_part and loads(client_half(app)):
        wrap = wrap.training(known.adapters)
    return Inspection(
        wrap,
        found,
        clients,
        change_of(app, wrap),
        (*plain.told(options, None if known is None else known.rounds), *losses(plain.app, wrap)),
        "" if known is None else forecast_of(wrap, known, clients=clients),
    )
