"""Signs the heads of a ledger's experiments with the node's long-term key."""

from pathlib import Path

from flwr_privacy.errors import check_choice
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.privacy.ledger.signed_head import SignedHead
from flwr_privacy.wire.pins import Identity

__all__ = ["signed_heads"]


def signed_heads(
    file: Path, client: str, identity: Path | None = None, experiment: str | None = None
) -> list[SignedHead]:
    """Return the heads of a ledger's experiments.

    Parameters
    ----------
    file : Path
        ``<data set>.ledger``.
    client : str
        Whose head it is.
    identity : Path, optional
        PEM file of its long-term key; by default the key that the node has made for it, beside the
        ledger. Without that the heads are not signed.
    experiment : str, optional
        The experiment; by default all.

    Raises
    ------
    LedgerError
        If the ledger cannot be read.
    InvalidParameterError
        If the key cannot be read, or the ledger has no such experiment.
    """
    ledger = Ledger(file, data_set=file.stem).view()
    experiments = ledger.experiments()
    if experiment is not None:
        experiments = (check_choice("--experiment", experiment, experiments),)
    made = file.with_name(f"{client}.identity")
    if identity is None and made.exists():
        identity = made
    key = None if identity is None else Identity.read(identity)
    return [
        SignedHead.sign(key, experiment=one, client=client, head=ledger.head(one))
        for one in experiments
    ]
