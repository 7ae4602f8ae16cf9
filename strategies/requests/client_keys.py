"""Knows which key belongs to the name of which client: the pinned one, or the first one shown."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from flwr_privacy.errors import ProtocolError, check_choice
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.wire.hello import key_text, proven_key
from flwr_privacy.wire.message import Fields, Header

if TYPE_CHECKING:  # it loads cryptography
    from flwr_privacy.wire.pins import Pins

__all__ = ["REASON", "ClientKeys"]

REASON = "identity"
"""Under what a hello is counted whose name belongs to somebody else."""


class ClientKeys:
    """The long-term keys of a federation's clients, for one experiment.

    Parameters
    ----------
    pins : Pins, optional
        The keys that the server's operator got without the nodes. Then nobody else takes part.
        Without pins the first key that a client shows is kept; a client that shows none is known
        by its name alone, which anybody takes who shows up while its node is away.
    """

    def __init__(self, pins: "Pins | None" = None) -> None:
        self._pins = pins
        self._kept: dict[str, str] = {}
        self._retired: dict[str, str] = {}  # what was forgotten; it may have been stolen

    def admit(
        self, header: Header, fields: Fields, *, nonce: bytes, node: int, holder: int | None
    ) -> None:
        """Let a client in, and keep its key.

        Parameters
        ----------
        header, fields, nonce, node
            Its hello, as `flwr_privacy.wire.hello.proven_key` takes it.
        holder : int, optional
            The node that has its name now.

        Raises
        ------
        ReplyRefusedError
            If the hello is not signed as it says, or the name belongs to another key or node.
        """
        client = header.client_id
        try:
            key = proven_key(header, fields, nonce=nonce, node=node)
        except ProtocolError as error:
            text = f"node {node} says that it is client '{client}': {error}"
            raise ReplyRefusedError(REASON, text) from error
        if holder is not None:
            raise ReplyRefusedError(
                REASON,
                f"two nodes say that they are client '{client}' (nodes {holder} with "
                f"{key_text(self._kept.get(client, ''))} and {node} with {key_text(key)}): give "
                "each its own client-id in its node configuration",
            )
        if refusal := self._refusal(client, key):
            text = f"node {node} with {key_text(key)} says that it is client '{client}': {refusal}"
            raise ReplyRefusedError(REASON, text)
        if key:
            self._kept[client] = key

    def key_of(self, client: str) -> str:
        """Return the key that belongs to a client's name; "" if none is known."""
        keys: Mapping[str, str] = self._kept if self._pins is None else self._pins.clients
        return keys.get(client, "")

    @property
    def pinned(self) -> frozenset[str] | None:
        """The clients that have a pin; None without pins."""
        return None if self._pins is None else frozenset(self._pins.clients)

    def state(self) -> dict[str, dict[str, str]]:
        """Return the keys that are kept, and those that were forgotten, for a checkpoint."""
        return {"kept": dict(self._kept), "retired": dict(self._retired)}

    def load_state(
        self, state: Mapping[str, Mapping[str, str]], *, forget: Iterable[str] = ()
    ) -> None:
        """Restore what `state` returned, but for the clients whose next key is to be kept.

        Parameters
        ----------
        state : Mapping
            The keys.
        forget : iterable of str
            Clients to forget. Their old key is refused from then on, and so is a hello without one.

        Raises
        ------
        InvalidParameterError
            If no key of one of them is kept.
        """
        self._kept, self._retired = dict(state["kept"]), dict(state["retired"])
        for client in dict.fromkeys(forget):
            check_choice("forget_keys", client, list(self._kept))
            self._retired[client] = self._kept.pop(client)

    def _refusal(self, client: str, key: str) -> str:
        if self._pins is not None and client not in self._pins:
            return "the server has no pin of it"
        keys: Mapping[str, str] = self._kept if self._pins is None else self._pins.clients
        if self._pins is None and client in self._retired and key in ("", self._retired[client]):
            return "its old key was forgotten, and its new one is waited for"
        known = keys.get(client, key)
        if known == key:
            return ""
        return (
            f"its {'first' if self._pins is None else 'pinned'} key is {key_text(known)} (if it "
            "has a new one: docs/deployment.md, New keys and pins)"
        )
