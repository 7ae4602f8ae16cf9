"""The parameters that server and clients of FedVS agree on, and its messages."""

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import InvalidParameterError, ProtocolError, check_integer
from flwr_privacy.wire.channel import canonical
from flwr_privacy.wire.identity import check_client_id

from .data import TRAIN_PART
from .network import expanded_width
from .privacy import check_slack
from .quantisation import Scales
from .rows import Segments

__all__ = ["Chunk", "CodeTerms", "DealRequest", "Evaluation"]

ENROL, CODE, DEAL = "enrol", "code", "weights"
"""Phases beside that of the training, in which embeddings are evaluated: saying who one is, sharing
rows, sharing weights."""

DEAL_EVALUATION, EMBED_EVALUATION, ORACLE = "weights-evaluation", "embed-evaluation", "oracle"
"""Phases of an evaluation: sharing weights and evaluating, or plain embeddings in simulations."""

SEALED, GRADIENT, ANSWER = "sealed", "gradient", "answer"
"""Arrays of the messages."""

SEAL_BYTES = 28
"""What sealing a message adds: a nonce of 12 bytes and a tag of 16."""

_MOST_ROWS = 2**31
_MOST_WIDTH = 2**20


@dataclass(frozen=True, kw_only=True)
class CodeTerms:
    """The parameters of one generation of coded data.

    Parameters
    ----------
    generation : str
        Name of this coding of the data: all shares of one generation go together.
    members : list of str
        The N clients; a client's place in the list is its place in the code.
    keys, signatures : list of bytes
        Their public keys, and signatures by long-term identities (empty without one).
    columns, orders : list of int
        Raw features d_n of each client, and the order D_n of its polynomial network.
    parts, rows : list of str, list of int
        Names of the sets of rows that are coded, and how many rows each has.
    partitions, privacy : int
        K and T.
    least : int
        Least number of clients over which embeddings are summed.
    prime : int
        p.
    data_bits, weight_bits : int
        l_x and l_w.
    x_max, w_max : float
        Bounds of the absolute values of expanded features and of weights.
    embedding : int
        h.
    bias : bool
        Whether a column of ones is appended.
    mean : bool
        Whether embeddings are averaged; otherwise they are added.
    zero_mask, project, paper : bool
        Whether answers are hardened by zero masks; whether weights are kept within `w_max`;
        whether everything is as the paper prints it.
    """

    generation: str
    members: list[str]
    keys: list[bytes]
    signatures: list[bytes]
    columns: list[int]
    orders: list[int]
    parts: list[str]
    rows: list[int]
    partitions: int
    privacy: int
    least: int
    prime: int
    data_bits: int
    weight_bits: int
    x_max: float
    w_max: float
    embedding: int
    bias: bool
    mean: bool
    zero_mask: bool
    project: bool
    paper: bool

    def check(self) -> None:
        """Check that the terms are consistent, and that no sum can wrap around.

        Raises
        ------
        InvalidParameterError
            If a parameter is out of range or the field is too small; the message names it.
        ProtocolError
            If the lists do not fit each other.
        """
        count = len(self.members)
        lists = (self.keys, self.signatures, self.columns, self.orders)
        if any(len(entries) != count for entries in lists) or len(self.parts) != len(self.rows):
            raise ProtocolError("the lists of the terms have different lengths")
        for name in self.members:
            check_client_id(name, parameter="members")
        if len(set(self.members)) != count or len(set(self.keys)) != count:
            raise ProtocolError("two members have one name or one key")
        if len(set(self.parts)) != len(self.parts) or TRAIN_PART not in self.parts:
            raise ProtocolError(f"the parts {self.parts} are not distinct, or lack 'train'")
        for width in self.columns:
            check_integer("columns", width, minimum=1, maximum=_MOST_WIDTH)
        for order in self.orders:
            check_integer("order", order, minimum=1, maximum=64)
        for rows in self.rows:
            check_integer("rows", rows, minimum=1, maximum=_MOST_ROWS)
        check_integer("embedding", self.embedding, minimum=1, maximum=_MOST_WIDTH)
        if count < 2:
            allowed = "at least 2: the sum of one client's embeddings is that client's"
            raise InvalidParameterError("clients", count, allowed)
        check_integer("least", self.least, minimum=2, maximum=count)
        if self.project == self.paper:
            allowed = "the opposite of paper: weights without bounds are the paper's"
            raise InvalidParameterError("project", self.project, allowed)
        if not self.zero_mask and not self.paper:
            allowed = "true: without zero masks answers can say more than their sum (paper=True)"
            if (self.partitions + self.privacy) > sum(self.widths):
                raise InvalidParameterError("zero_mask", self.zero_mask, allowed)
        _ = self.code  # which checks K, T, p and N
        if self.project:
            self.scales.check(self.widths, self.field)

    @cached_property
    def field(self) -> PrimeField:
        """The field."""
        return PrimeField(self.prime)

    @cached_property
    def code(self) -> LagrangeCode:
        """The code."""
        return LagrangeCode(
            N=len(self.members), K=self.partitions, T=self.privacy, field=self.field
        )

    @cached_property
    def scales(self) -> Scales:
        """The grids of data and weights."""
        return Scales(
            data_bits=self.data_bits,
            weight_bits=self.weight_bits,
            x_max=self.x_max,
            w_max=self.w_max,
        )

    @cached_property
    def widths(self) -> list[int]:
        """Columns e_n of each client's expanded data."""
        both = zip(self.columns, self.orders, strict=True)
        return [expanded_width(columns, order, bias=self.bias) for columns, order in both]

    @cached_property
    def offsets(self) -> list[int]:
        """Where the columns of each client begin in a row of all, and their number at the end."""
        places = [0]
        for width in self.widths:
            places.append(places[-1] + width)
        return places

    def place(self, member: str) -> int:
        """Return the place of a member.

        Raises
        ------
        ProtocolError
            If it is none.
        """
        if member not in self.members:
            raise ProtocolError(f"'{member[:64]}' is no member of this coding")
        return self.members.index(member)

    def segments(self, part: str) -> Segments:
        """Return the segments of a part's rows in the coded rows.

        Raises
        ------
        ProtocolError
            If there is no such part.
        """
        if part not in self.parts:
            raise ProtocolError(f"there is no part '{part[:64]}' in this coding: {self.parts}")
        return Segments(rows=self.rows[self.parts.index(part)], K=self.partitions)

    def check_batch(self, coded_rows: int) -> None:
        """Refuse a batch whose answers reveal more than their sums, unless zero masks hide it.

        Raises
        ------
        InvalidParameterError
            If there are no zero masks outside of paper mode, and the batch is too large.
        """
        if not self.zero_mask and not self.paper:
            check_slack(
                b=coded_rows, K=self.partitions, T=self.privacy, E=sum(self.widths), p=self.prime
            )

    def bytes_of(self, elements: int) -> int:
        """Return the bytes that some elements take in a message."""
        return -(-elements * self.field.bits // 8)

    @cached_property
    def digest(self) -> bytes:
        """A hash of all terms, 32 bytes."""
        values = []
        for entry in fields(self):
            value = getattr(self, entry.name)
            plain = isinstance(value, str | bytes | list) or type(value) is int
            values.append([entry.name, value if plain else repr(value)])
        return hashlib.sha256(canonical("fedvs terms", values)).digest()


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Coded rows of a part that are dealt at a time.

    Parameters
    ----------
    part : str
        The part.
    first, count : int
        The first coded row, and how many; 0 if nothing more is dealt.
    """

    part: str
    first: int
    count: int


@dataclass(frozen=True, kw_only=True)
class DealRequest:
    """The request for shares of the weights.

    Parameters
    ----------
    generation : str
        The coding that it is about.
    session : str
        Name of the server's run, another one after a resume.
    update : int
        Number of gradients up to now, the one that comes with the request included.
    learning_rate : float
        Step size of that gradient.
    trained_rows : list of int
        Its coded rows; empty if none comes.
    trained_dealers : list of str
        Whose embeddings were in the sum that it is of.
    deals : bool
        Whether shares are to be dealt.
    share_set : str
        Name of the set of shares.
    part : str
        Part whose rows are evaluated on these shares.
    evaluated_rows : list of int
        Those rows, as coded rows.
    maskers : list of str
        Who adds zero masks.
    """

    generation: str
    session: str
    update: int
    learning_rate: float
    trained_rows: list[int]
    trained_dealers: list[str]
    deals: bool
    share_set: str
    part: str
    evaluated_rows: list[int]
    maskers: list[str]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The request for coded embeddings.

    Parameters
    ----------
    generation, share_set : str
        The coding and the set of shares.
    dealers : list of str
        Whose shares were dealt in full: the embeddings are summed over them.
    """

    generation: str
    share_set: str
    dealers: list[str]
