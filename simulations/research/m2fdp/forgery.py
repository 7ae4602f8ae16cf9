"""What a malicious M2FDP server gets: it forges messages, replays them, and asks twice.

The server has the requests and answers of a real training with aggregators that are nodes of their
own (`relay` beside this file). In further rounds it asks the same nodes by itself, with fields of
its own. It names budgets, so that no refusal here is one for lack of budget. What matters is what
leaves a trusted zone: every noised release of a device's data must be one that the device has
charged for, with the noise that it has charged for, and nothing may leave without noise.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr_privacy.m2fdp.terms import AGGREGATE, DOWN, NOISED
from flwr_privacy.wire.channel import Channel, KeyPair
from flwr_privacy.wire.message import RECORD, TRAIN
from flwr_privacy.wire.pins import Identity

from .relay import ROUNDS, Passage, TappedGrid, Training

__all__ = ["FORGERIES", "HONEST", "Forged", "Server", "forge"]

HONEST = "what it should ask"
"""Name of the round that the server asks by itself and does not forge."""

_BUDGET = 1e4
_CLEAN, _LAST = 0, 1  # events of a round

Fields = dict[str, Any]


class Refused(Exception):
    """A node refused a request; the text gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Forged:
    """A forgery that the server tried, and its outcome.

    Parameters
    ----------
    name : str
        What it did.
    outcome : str
        Why a node refused, or what became of it otherwise.
    refused : bool
        Whether it got nothing that it should not have.
    """

    name: str
    outcome: str
    refused: bool


class Server:
    """A server that sends requests of its own, over the grid of a finished training."""

    def __init__(self, grid: TappedGrid) -> None:
        self.grid = grid
        self.round = self._latest = ROUNDS
        self.pair, self.identity = KeyPair(), Identity.generate()
        self.codes = b""  # of the last answer
        self._asked: dict[tuple[str, str, int], Passage] = {}
        for passage in grid.requests:
            fields = passage.fields
            if "event" in fields:
                self._asked[fields["phase"], passage.client, fields["event"]] = passage

    def turn(self) -> None:
        """Begin a round that there was not before."""
        self._latest += 1
        self.round = self._latest

    def request(self, phase: str, client: str, event: int = _LAST) -> Fields:
        """Return what it should ask a client at an event, as if no clean event had been."""
        fields = self._asked[phase, client, event].fields
        fields |= {"round": self.round, "epsilon": _BUDGET}
        for name in ("start-sealed", "start-event"):
            fields.pop(name, None)
        return fields

    def ask(self, client: str, fields: Fields) -> Fields:
        """Ask a client; return its own fields and the names of the arrays of its answer.

        Raises
        ------
        Refused
            If it does not answer.
        """
        phase, event = fields["phase"], fields["event"]
        passage = self._asked.get((phase, client, event)) or self._asked[phase, client, _LAST]
        answer = self.grid.ask(passage, fields)
        if answer.has_error():
            raise Refused(str(answer.error.reason).strip().partition("\n")[0])
        arrays = answer.content.array_records.values()
        self.codes = b"".join(array.data for record in arrays for array in record.values())
        return dict(answer.content.config_records[RECORD])

    def sealed(self, devices: str = "012", event: int = _LAST, **changes: Any) -> list[bytes]:
        """Ask devices of the ward east for what they seal."""
        return [
            self.ask(device, {**self.request(TRAIN, device, event), **_dashed(changes)}).get(
                "sealed", b""
            )
            for device in devices
        ]

    def duty(self, client: str, sealed: list[bytes], event: int = _LAST, **changes: Any) -> Fields:
        """Return what it should ask an aggregator that has these answers of its children."""
        fields = self.request(AGGREGATE, client, event)
        return {**fields, "sealed": sealed, **_dashed(changes)}

    def hospital(self) -> tuple[list[bytes], float]:
        """Ask all of the hospital as it should be; return what the wards sealed, and sigma."""
        east = self.ask("east", self.duty("east", self.sealed()))["sealed"]
        west = self.ask("west", self.duty("west", self.sealed("34")))["sealed"]
        noised = self.ask("hospital", self.duty("hospital", [east, west]))
        return [east, west], float(noised["sigma"])

    def signed(self, client: str, experiment_id: str) -> bytes:
        """Return the server's own signature of its own key, as a client would sign."""
        return self.identity.sign("m2fdp key", experiment_id, client, self.pair.public)


Forgery = Callable[[Server], str]
"""Tries something; raises `Refused` if a node refuses. What it returns says why the answer does no
harm; nothing if it does."""


def _invented_child(server: Server) -> str:
    fields = server.duty("east", server.sealed())
    name, experiment = "9", fields["experiment-id"]
    for key in ("children", "senders", "members"):
        fields[key] = [*fields[key], name]
    fields["sealed"] = [*fields["sealed"], fields["sealed"][0]]
    fields["keys"] = [*fields["keys"], server.pair.public]
    fields["signatures"] = [*fields["signatures"], server.signed(name, experiment)]
    server.ask("east", fields)
    return ""


def _own_key_for_a_child(server: Server) -> str:
    fields = server.duty("east", server.sealed())
    fields["keys"] = [*fields["keys"][:2], server.pair.public]
    signature = server.signed("2", fields["experiment-id"])
    fields["signatures"] = [*fields["signatures"][:2], signature]
    server.ask("east", fields)
    return ""


def _made_up_answer(server: Server) -> str:
    fields = server.duty("east", server.sealed())
    of_east = server.request(TRAIN, "0")["parent-key"]
    context = ("m2fdp", 1, fields["experiment-id"])
    channel = Channel(server.pair, of_east, me="2", peer="east", context=context)
    fields["sealed"] = [*fields["sealed"][:2], channel.seal(b"codes")]
    server.ask("east", fields)
    return ""


def _old_answer(server: Server) -> str:
    old = server.sealed()
    server.turn()
    new = server.sealed()
    server.ask("east", server.duty("east", [*new[:2], old[2]]))
    return ""


def _swapped_answers(server: Server) -> str:
    first, second, third = server.sealed()
    server.ask("east", server.duty("east", [second, first, third]))
    return ""


def _bent_answer(server: Server) -> str:
    first, *others = server.sealed()
    bent = first[:-40] + bytes([first[-40] ^ 1]) + first[-39:]
    server.ask("east", server.duty("east", [bent, *others]))
    return ""


def _answers_of_another_event(server: Server) -> str:
    server.ask("east", server.duty("east", server.sealed(), event=_CLEAN))
    return ""


def _fewer_asked(server: Server) -> str:
    fields = server.duty("east", server.sealed()[:2])
    for name in ("children", "senders", "members", "keys", "signatures"):
        fields[name] = fields[name][:2]
    server.ask("east", fields)
    return ""


def _one_child(server: Server) -> str:
    fields = server.duty("east", server.sealed()[:1], min_children=1)
    for name in ("senders", "members", "keys", "signatures"):
        fields[name] = fields[name][:1]
    server.ask("east", fields)
    return ""


def _less_noise(server: Server) -> str:
    fields = server.duty("east", server.sealed())
    server.ask("east", {**fields, "noise-multiplier": fields["noise-multiplier"] / 10})
    return ""


def _no_noise_of_an_aggregator(server: Server) -> str:
    server.ask("east", server.duty("east", server.sealed(), noise_multiplier=0.0))
    return ""


def _another_law(server: Server) -> str:
    server.ask("east", server.duty("east", server.sealed(), law="lemma"))
    return ""


def _in_the_open(server: Server) -> str:
    server.sealed("0", sealed=False)
    return ""


def _no_noise_of_a_device(server: Server) -> str:
    server.sealed("0", noise_multiplier=0.0, clipping_norm=1.0)
    return ""


def _parent_of_its_own(server: Server) -> str:
    signature = server.signed("server", server.request(TRAIN, "0")["experiment-id"])
    own = server.pair.public
    server.sealed("0", parent="server", parent_key=own, parent_signature=signature)
    return ""


def _own_key_for_the_parent(server: Server) -> str:
    signature = server.signed("east", server.request(TRAIN, "0")["experiment-id"])
    server.sealed("0", parent_key=server.pair.public, parent_signature=signature)
    return ""


def _start_of_another(server: Server) -> str:
    down = server.ask("east", server.duty("east", server.sealed(event=_CLEAN), event=_CLEAN))
    server.sealed("0", start_sealed=down["sealed"][1], start_event=_CLEAN)
    return ""


def _second_average(server: Server) -> str:
    (east, west), _ = server.hospital()
    before = server.codes
    fields = server.duty("east", server.sealed()[:2])
    for name in ("senders", "members", "keys", "signatures"):
        fields[name] = fields[name][:2]
    fewer = server.ask("east", fields)["sealed"]
    assert fewer != east
    server.ask("hospital", server.duty("hospital", [fewer, west]))
    return "the same answer" if server.codes == before else ""


def _second_average_later(server: Server) -> str:
    (east, west), _ = server.hospital()
    before = server.round
    server.turn()
    server.hospital()
    server.round = before
    server.grid.forget()
    server.ask("hospital", server.duty("hospital", [east, west], epsilon=2 * _BUDGET))
    return ""


def _noised_on_the_way(server: Server) -> str:
    server.hospital()
    charged = server.grid.ledger("0")
    server.ask("east", server.duty("east", server.sealed(), way=NOISED))
    return _charged(server, "0", charged + 1)


def _noised_and_sealed(server: Server) -> str:
    charged = server.grid.ledger("0")
    server.ask("0", {**server.request(TRAIN, "0"), "noised": True, "sealed": False})
    server.hospital()
    return _charged(server, "0", charged + 2)


def _two_parents(server: Server) -> str:
    charged = server.grid.ledger("0")
    server.sealed("0")
    west = server.request(TRAIN, "3")
    names = ("parent", "parent-key", "parent-signature")
    fields = {**server.request(TRAIN, "0"), **{name: west[name] for name in names}}
    server.ask("0", {**fields, "siblings": ["0", "3", "4"]})
    return _charged(server, "0", charged + 2)


def _another_tier(server: Server) -> str:
    """Let what a clean event has moved in all devices pass for what one device moves."""
    _, sigma = _after_a_clean_event(server, own_tier=2)
    server.turn()
    _, less = _after_a_clean_event(server, own_tier=1)
    return "with the same noise" if less > 0.99 * sigma else ""


def _after_a_clean_event(server: Server, *, own_tier: int) -> tuple[list[bytes], float]:
    """Ask the hospital after a clean event in its wards; return what they sealed, and sigma."""
    wards = []
    for ward, devices in (("east", "012"), ("west", "34")):
        first = server.sealed(devices, event=_CLEAN)
        down = server.ask(ward, server.duty(ward, first, event=_CLEAN))["sealed"]
        second = [
            server.sealed(device, start_sealed=start, start_event=_CLEAN)[0]
            for device, start in zip(devices, down, strict=True)
        ]
        wards.append(server.ask(ward, server.duty(ward, second, own_tier=own_tier))["sealed"])
    return wards, float(server.ask("hospital", server.duty("hospital", wards))["sigma"])


def _clean_events_end_below(server: Server) -> str:
    """Ask a ward to hand a model down that the devices sealed for the hospital's event."""
    server.ask("east", server.duty("east", server.sealed(), way=DOWN, tier=2))
    return ""


def _charged(server: Server, device: str, releases: int) -> str:
    """Return that a device has charged for so many releases, if it has."""
    return "charged for" if server.grid.ledger(device) >= releases else ""


FORGERIES: dict[str, Forgery] = {
    "a child that it invented": _invented_child,
    "its own key for a child": _own_key_for_a_child,
    "an answer that it made up": _made_up_answer,
    "an answer of an earlier round": _old_answer,
    "answers of two children swapped": _swapped_answers,
    "an answer with a bit turned": _bent_answer,
    "answers sealed for another event": _answers_of_another_event,
    "an average handed down that was to go up": _clean_events_end_below,
    "answers with fewer children asked": _fewer_asked,
    "one child alone": _one_child,
    "less noise than the devices were told": _less_noise,
    "no noise, of an aggregator": _no_noise_of_an_aggregator,
    "another law of drift": _another_law,
    "an aggregator at another tier": _another_tier,
    "an answer in the open": _in_the_open,
    "no noise, of a device": _no_noise_of_a_device,
    "itself as the parent": _parent_of_its_own,
    "its own key for the parent": _own_key_for_the_parent,
    "a start that was sealed for another device": _start_of_another,
    "the same event again, of fewer children": _second_average,
    "an earlier event again, in a new run": _second_average_later,
    "noise on the way, and at the top": _noised_on_the_way,
    "an answer noised, and sealed": _noised_and_sealed,
    "an answer for two parents": _two_parents,
}
"""What the server tries, by what it does."""


def forge(*, seed: int = 0) -> list[Forged]:
    """Try all forgeries, each in rounds of its own, then ask what should be asked.

    Parameters
    ----------
    seed : int, default 0
        Root of what the devices compute.

    Returns
    -------
    list of Forged
        One for each of `FORGERIES`, and `HONEST` last, which has to be answered.

    Raises
    ------
    InvalidParameterError
        If the seed is out of range.
    """
    training = Training(seed=seed, trusted={"0": ("east", "west")})
    found = []
    with training.run() as grid:
        server = Server(grid)
        for name, forgery in FORGERIES.items():
            server.turn()
            found.append(_tried(name, forgery, server))
        server.turn()
        _, sigma = server.hospital()
        text = f"answered, with noise of standard deviation {sigma:.3g}"
        found.append(Forged(name=HONEST, outcome=text, refused=False))
    return found


def _tried(name: str, forgery: Forgery, server: Server) -> Forged:
    try:
        harmless = forgery(server)
    except Refused as refusal:
        return Forged(name=name, outcome=str(refusal), refused=True)
    return Forged(name=name, outcome=harmless or "answered", refused=bool(harmless))


def _dashed(changes: Mapping[str, Any]) -> Fields:
    return {name.replace("_", "-"): value for name, value in changes.items()}
