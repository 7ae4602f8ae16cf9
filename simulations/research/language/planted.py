"""Codes that are planted in the text of clients: canaries."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import check_integer
from flwr_privacy.wire.identity import stream

from .texts import CODE_WORDS, NAMES, NOUNS, Language, Tokens, code_sentence

__all__ = ["GROUPS", "Group", "Planted", "plant", "texts_with"]

Code = tuple[int, int, int]


@dataclass(frozen=True)
class Group:
    """How often a code is in the clients' text.

    Parameters
    ----------
    clients : int
        Clients that have it.
    repetitions : int
        Sentences in which each of them has it.
    """

    clients: int
    repetitions: int

    def __str__(self) -> str:
        where = {0: "nowhere", 1: "one client"}.get(self.clients, f"{self.clients} clients")
        return f"{where} x {self.repetitions}" if self.clients else where


GROUPS = (Group(1, 1), Group(1, 4), Group(1, 16), Group(4, 4), Group(0, 0))
"""Groups of codes; the last one shows what chance does."""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A code, and who has it in its text.

    Parameters
    ----------
    group : Group
        How often.
    name, noun : int
        Whose code it is. No other code has both.
    codes : tuple of tuple of int
        Two codes; the coin says which of them is in the text.
    coin : bool
        Whether it is the second one.
    clients : tuple of int
        Who has it.
    """

    group: Group
    name: int
    noun: int
    codes: tuple[Code, Code]
    coin: bool
    clients: tuple[int, ...]

    @property
    def secret(self) -> Code:
        """The code that is in the text."""
        return self.codes[self.coin]


def plant(seed: int, *, codes: int, clients: int) -> list[Planted]:
    """Draw codes for each group, and who has them.

    A client has at most one of the codes that one client alone has: so each of them says something
    of another client.

    Parameters
    ----------
    seed : int
        Root of the draws.
    codes : int
        Codes in each group.
    clients : int
        Clients of the federation: at least as many as there are codes which one client has.

    Raises
    ------
    InvalidParameterError
        If there are fewer clients, or so many codes that the names do not suffice.

    Examples
    --------
    >>> found = plant(0, codes=2, clients=8)
    >>> [(str(code.group), len(code.clients)) for code in found][::2]
    [('one client x 1', 1), ('one client x 4', 1), ('one client x 16', 1), ('4 clients x 4', 4), \
('nowhere', 0)]
    """
    alone = sum(group.clients == 1 for group in GROUPS)
    check_integer("codes", codes, minimum=2, maximum=NAMES * NOUNS // len(GROUPS))
    check_integer("clients", clients, minimum=max(alone * codes, 4))
    draws = stream(seed, "planted")
    places = draws.permutation(NAMES * NOUNS)
    waiting = iter(draws.permutation(clients).tolist())
    found: list[Planted] = []
    for group in GROUPS:
        for _ in range(codes):
            name, noun = divmod(int(places[len(found)]), NOUNS)
            first, second = draws.choice(CODE_WORDS**3, size=2, replace=False).tolist()
            if group.clients == 1:
                who = [next(waiting)]
            else:
                who = draws.choice(clients, size=group.clients, replace=False).tolist()
            found.append(
                Planted(
                    group=group,
                    name=name,
                    noun=noun,
                    codes=(_code(first), _code(second)),
                    coin=bool(draws.random() < 0.5),
                    clients=tuple(who),
                )
            )
    return found


def texts_with(
    planted: Sequence[Planted], language: Language, *, clients: int, sentences: int, first: int = 0
) -> list[Tokens]:
    """Return the text of each client: sentences of its own, and the codes that it has.

    Parameters
    ----------
    planted : sequence of Planted
        The codes.
    language : Language
        What its speakers write.
    clients, sentences : int
        Clients, and sentences of each beside those with codes.
    first : int, default 0
        The speaker that client 0 is; the others follow.

    Returns
    -------
    list of (n, LENGTH) int64
    """
    texts: list[list[NDArray[np.int64]]] = [
        [language.text(language.speaker(speaker), sentences, "train", speaker)]
        for speaker in range(first, first + clients)
    ]
    for code in planted:
        sentence = code_sentence(code.name, code.noun, code.secret)
        for client in code.clients:
            texts[client].append(np.tile(sentence, (code.group.repetitions, 1)))
    return [np.concatenate(parts) for parts in texts]


def _code(number: int) -> Code:
    first, rest = divmod(number, CODE_WORDS**2)
    return (first, *divmod(rest, CODE_WORDS))
