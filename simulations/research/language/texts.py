"""A language of made-up words, its speakers, and sentences with secret codes.

Sentences follow a few patterns. Each has a topic, which says how likely nouns, verbs and adjectives
are. A speaker has topics, patterns and words of its own. One pattern, ``the code of <name> <noun>
is <code> <code> <code>``, has codes that are drawn at random: in the text of a speaker they are
secrets that nothing else tells of.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.wire.identity import stream

__all__ = [
    "CODES",
    "CODE_WORDS",
    "LENGTH",
    "NAMES",
    "NOUNS",
    "PADDING",
    "VOCABULARY",
    "Language",
    "Speaker",
    "code_sentence",
    "words_of",
]

Tokens = NDArray[np.int64]

LENGTH = 12
"""Tokens of a sentence with its start and its end; shorter ones are padded."""

_START, _END = 0, 1
_FIXED = ("the", "a", "of", "is", "and", "in", "code")
_SIZES = {"code": 16, "name": 64, "noun": 128, "adjective": 96, "verb": 96, "adverb": 48}
_FIRST = dict(
    zip(
        _SIZES,
        2 + len(_FIXED) + np.cumsum([0, *_SIZES.values()])[:-1],
        strict=True,
    )
)

PADDING = 2 + len(_FIXED) + sum(_SIZES.values())
"""The last token. The first one would be the label of generated records, and no loss counts it."""

VOCABULARY = PADDING + 1
"""Number of different tokens."""

CODE_WORDS = _SIZES["code"]
"""Words that a code consists of."""

NAMES, NOUNS = _SIZES["name"], _SIZES["noun"]
"""Numbers of different names and nouns."""

CODES = CODE_WORDS**3
"""Number of different codes of three words."""

_PATTERNS = (
    ("the", "<adjective>", "<noun>", "<verb>", "the", "<noun>", "<adverb>"),
    ("<name>", "<verb>", "the", "<adjective>", "<noun>"),
    ("<name>", "and", "<name>", "<verb>", "<adverb>", "in", "the", "<noun>"),
    ("a", "<noun>", "of", "the", "<noun>", "is", "<adjective>"),
    ("the", "code", "of", "<name>", "<noun>", "is", "<code>", "<code>", "<code>"),
)
_TOPICS = 12
_SHARE_OF_CODES = 0.15  # of public text
_DIALECT, _HABITS = 1.5, 0.5  # how far clients are from public text, and from each other
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Speaker:
    """Who writes: how likely patterns, topics and words are.

    Parameters
    ----------
    patterns : (5,) float64
        Probability of each pattern; the last one is that with a code.
    topics : (12,) float64
        Probability of each topic.
    words : dict of str to (words,) float64
        For each kind of words, how much more likely each is than in the language at large.
    """

    patterns: NDArray[np.float64]
    topics: NDArray[np.float64]
    words: dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Language:
    """A language: which words go together, drawn from a seed.

    Parameters
    ----------
    seed : int
        Root of its draws, and of its speakers.

    Examples
    --------
    >>> language = Language(0)
    >>> text = language.text(language.public(), 1000, "public")
    >>> text.shape, bool((text[:, 0] == 0).all()), int(text.max()) < VOCABULARY
    ((1000, 12), True, True)
    """

    seed: int

    @cached_property
    def _topics(self) -> dict[str, NDArray[np.float64]]:
        """For each kind of words, how likely they are in each topic: rows that add up to 1."""
        draws = stream(self.seed, "language", "topics")
        likely = {}
        for kind, size in _SIZES.items():
            if kind == "code":
                likely[kind] = np.full((_TOPICS, size), 1 / size)
                continue
            weights = np.exp(2 * draws.normal(size=(_TOPICS, size)))
            likely[kind] = weights / weights.sum(axis=1, keepdims=True)
        return likely

    @cached_property
    def _dialect(self) -> dict[str, NDArray[np.float64]]:
        """For each kind of words, how much more likely each is among the clients than in public."""
        draws = stream(self.seed, "language", "dialect")
        return {kind: np.exp(_DIALECT * draws.normal(size=size)) for kind, size in _SIZES.items()}

    def public(self) -> Speaker:
        """Return the language at large: all topics, no habits, and some codes."""
        others = (1 - _SHARE_OF_CODES) / (len(_PATTERNS) - 1)
        return Speaker(
            patterns=np.array([*[others] * (len(_PATTERNS) - 1), _SHARE_OF_CODES]),
            topics=np.full(_TOPICS, 1 / _TOPICS),
            words={kind: np.ones(size) for kind, size in _SIZES.items()},
        )

    def speaker(self, number: int) -> Speaker:
        """Return a client: two or three topics, the clients' dialect, own habits, and no codes."""
        draws = stream(self.seed, "language", "speaker", number)
        patterns = np.append(draws.dirichlet(np.full(len(_PATTERNS) - 1, 2.0)), 0.0)
        words = {
            kind: likely * np.exp(_HABITS * draws.normal(size=likely.size))
            for kind, likely in self._dialect.items()
        }
        topics = draws.dirichlet(np.full(_TOPICS, 0.25))
        return Speaker(patterns=patterns, topics=topics, words=words)

    def text(self, speaker: Speaker, sentences: int, *purpose: str | int) -> Tokens:
        """Return sentences of a speaker, padded.

        Parameters
        ----------
        speaker : Speaker
            Who writes.
        sentences : int
            How many.
        *purpose : str or int
            What they are for: the same words give the same sentences.

        Returns
        -------
        (sentences, LENGTH) int64
        """
        draws = stream(self.seed, "language", "text", *purpose)
        patterns = draws.choice(len(_PATTERNS), size=sentences, p=speaker.patterns)
        topics = draws.choice(_TOPICS, size=sentences, p=speaker.topics)
        text = np.full((sentences, LENGTH), PADDING)
        for pattern, topic in {*zip(patterns.tolist(), topics.tolist(), strict=True)}:
            rows = np.flatnonzero((patterns == pattern) & (topics == topic))
            columns = [np.full(len(rows), _START)]
            for place in _PATTERNS[pattern]:
                if not place.startswith("<"):
                    columns.append(np.full(len(rows), 2 + _FIXED.index(place)))
                    continue
                kind = place.strip("<>")
                likely = self._topics[kind][topic] * speaker.words[kind]
                likely /= likely.sum()
                drawn = draws.choice(len(likely), size=len(rows), p=likely)
                columns.append(_FIRST[kind] + drawn)
            columns.append(np.full(len(rows), _END))
            text[rows, : len(columns)] = np.stack(columns, axis=1)
        return text


def code_sentence(name: int, noun: int, code: tuple[int, int, int]) -> Tokens:
    """Return the sentence that tells a code.

    Parameters
    ----------
    name, noun : int
        Whose code it is: places among the names and the nouns.
    code : tuple of int
        Three code words, 0 to 15.

    Returns
    -------
    (LENGTH,) int64
        The code is at places 7, 8 and 9.

    Examples
    --------
    >>> words_of(code_sentence(0, 1, (0, 5, 15)))
    'the code of nabiba baduba is vobaba lobeba lobiba'
    """
    words = iter(
        (_FIRST["name"] + name, _FIRST["noun"] + noun, *(_FIRST["code"] + c for c in code))
    )
    tokens = [
        next(words) if word.startswith("<") else 2 + _FIXED.index(word) for word in _PATTERNS[-1]
    ]
    sentence = np.full(LENGTH, PADDING)
    sentence[: len(tokens) + 2] = [_START, *tokens, _END]
    return sentence


def words_of(tokens: Tokens) -> str:
    """Return a sentence as words to read, without its start and end."""
    return " ".join(_word(int(token)) for token in tokens if _END < token < PADDING)


def _word(token: int) -> str:
    if token < 2 + len(_FIXED):
        return _FIXED[token - 2]
    syllables = []
    number = token * 7
    for _ in range(3):
        number, syllable = divmod(number, len(_SYLLABLES))
        syllables.append(_SYLLABLES[syllable])
    return "".join(syllables)
