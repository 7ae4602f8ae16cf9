"""FedVS on the client: stores shares of everybody's rows, deals weights, evaluates on shares.

The client owns columns of the data and the weights for them. What it deals of both are shares, each
sealed for one holder, so that the server that passes them on cannot read them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from flwr.app import Context
from flwr.clientapp import ClientApp

from flwr_privacy.clients.node.adapters import own_client_app
from flwr_privacy.clients.node.base import SchemeClient, Train
from flwr_privacy.errors import DeclinedError, check_flag, check_integer
from flwr_privacy.fedvs.data import VerticalData
from flwr_privacy.fedvs.terms import (
    CODE,
    DEAL,
    DEAL_EVALUATION,
    EMBED_EVALUATION,
    ENROL,
    ORACLE,
    Chunk,
    CodeTerms,
    DealRequest,
    Evaluation,
)
from flwr_privacy.pipeline.mechanism import ProtocolStep
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import TRAIN, Fields

from .coded_data import code, enrol, text_in
from .coded_round import deal, embed, embed_plainly
from .coding import Coding, agreed
from .columns import GivenData
from .sealed_shares import SCHEME

__all__ = ["FedVSClient", "fedvs_client_app"]


class FedVSClient(SchemeClient):
    """Client half of `flwr_privacy.strategies.FedVS`.

    Parameters
    ----------
    data : VerticalData or callable
        The client's columns, or a function without arguments that returns them; it is called only
        when they are needed.
    context : Context
        Flower's context of this client.
    paper : bool, default False
        Whether the client takes part in runs without zero masks, as the paper prints them.
    min_privacy : int, default 1
        Least T, the number of colluding clients that learn nothing from shares.
    partial_sums : bool, default False
        Whether embeddings may be summed without those of clients that are missing.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.

    Guarantee
    ---------
    As `flwr_privacy.strategies.FedVS`. All masks, the initial weights and the rounding of the
    weights come from a cryptographic generator. A share is sealed for its holder; a set of shares
    is evaluated once, for the rows for which it was dealt, and asked again with the same shares the
    same bytes leave. Answers leave only if enough clients dealt zero masks, and never over two sets
    of dealers for the same weights and rows. Plain embeddings leave in simulations only. A node
    whose policy has ``max_epsilon`` or ``units`` declines: sums without noise cost no epsilon that
    could be stated; one with ``min_summed`` declines smaller sums.
    Not covered: a server that makes clients up, unless the node pins keys: it would hold as many
    shares as it likes.
    """

    scheme: ClassVar[str] = SCHEME
    phases: ClassVar[frozenset[str]] = frozenset(
        {ENROL, CODE, DEAL, TRAIN, DEAL_EVALUATION, EMBED_EVALUATION, ORACLE}
    )

    def __init__(
        self,
        data: GivenData,
        context: Context | None = None,
        *,
        paper: bool = False,
        min_privacy: int = 1,
        partial_sums: bool = False,
    ) -> None:
        super().__init__(None, context)
        self._data = data
        self._partial = check_flag("partial_sums", partial_sums)
        self._paper = check_flag("paper", paper)
        self._min_privacy = check_integer("min_privacy", min_privacy, minimum=1)

    def release(self, phase: str, arrays: Arrays, fields: Fields, train: Train) -> ProtocolStep:
        """Return the step of the setup or of a round that a request asks for.

        Raises
        ------
        DeclinedError
            If this client does not allow the terms of a coding.
        InvalidParameterError, ProtocolError
            If the request is malformed.
        """
        data = self._data
        if phase == ENROL:
            generation = text_in(fields, "generation")
            return ProtocolStep(lambda store: enrol(store, data, generation), lambda state: None)
        if phase == CODE:
            terms, chunk = records.read(CodeTerms, fields), records.read(Chunk, fields)
            self._check_terms(terms)
            return ProtocolStep(
                lambda store: code(Coding(store, data, terms), chunk, arrays, fields),
                lambda state: terms.least,
            )
        if phase in (DEAL, DEAL_EVALUATION):
            dealing = records.read(DealRequest, fields)
            return ProtocolStep(lambda store: deal(store, data, dealing, arrays), _least)
        if phase == ORACLE:
            chunk = records.read(Chunk, fields)
            return ProtocolStep(
                lambda store: embed_plainly(store, data, chunk),
                lambda state: 0,
                simulated_only=True,
            )
        evaluation = records.read(Evaluation, fields)
        return ProtocolStep(lambda store: embed(store, data, evaluation, arrays), _least)

    def _check_terms(self, terms: CodeTerms) -> None:
        """Decline terms that this client does not allow."""
        terms.check()
        if not self._paper and (terms.paper or not terms.zero_mask):
            raise DeclinedError(
                "answers without zero masks were asked for, as the paper has them: this client "
                "allows them only if it is made with paper=True"
            )
        if terms.privacy < self._min_privacy:
            raise DeclinedError(
                f"T = {terms.privacy} was asked for: this client has min_privacy = "
                f"{self._min_privacy}"
            )
        if terms.least < len(terms.members) and not self._partial:
            raise DeclinedError(
                f"sums over {terms.least} of {len(terms.members)} clients were asked for: this "
                "client allows them only if it is made with partial_sums=True"
            )


def _least(state: Mapping[str, Any]) -> int | None:
    """Return over how many clients at least embeddings are summed; None before any coding."""
    return agreed(state).least if "terms" in state else None


def fedvs_client_app(
    data_fn: Callable[[Context], VerticalData],
    *,
    paper: bool = False,
    min_privacy: int = 1,
    partial_sums: bool = False,
) -> ClientApp:
    """Return the ClientApp of a client that has columns of the data, under FedVS.

    Parameters
    ----------
    data_fn : callable
        Takes the context and returns the client's columns; called only when they are needed.
    paper, min_privacy, partial_sums
        As of `FedVSClient`.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.

    Examples
    --------
    >>> app = fedvs_client_app(lambda context: VerticalData(train=[[0.5, 1.0], [0.0, -1.0]]))
    """
    check_flag("paper", paper)
    check_integer("min_privacy", min_privacy, minimum=1)
    check_flag("partial_sums", partial_sums)
    own: dict[str, Any] = {"paper": paper, "min_privacy": min_privacy, "partial_sums": partial_sums}
    return own_client_app(
        partial(FedVSClient, **own),
        lambda context: partial(data_fn, context),
    )
