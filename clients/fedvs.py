"""FedVS on the client: hold shares of everybody's rows, deal weights, evaluate what is coded.

The client owns columns of the data and the weights for them. What it deals of both are shares, each
sealed for one holder, so that the server that passes them on cannot read them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from flwr.app import Context
from flwr.clientapp import ClientApp

from flwr_privacy import fields as records
from flwr_privacy.arrays import Arrays
from flwr_privacy.errors import DeclinedError, ProtocolError, check_flag, check_integer
from flwr_privacy.experiment_keys import check_signature, own_pair
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
    Dealing,
    Evaluation,
)
from flwr_privacy.ledger import Question
from flwr_privacy.release import question_of
from flwr_privacy.wire import TRAIN, Fields

from .adapters import own_client_app
from .base import SchemeClient, Train
from .coded_session import CodedSession, text_in
from .custody import Custody, is_simulated_client, refuse_node_keys
from .sealed_shares import SCHEME, key_name
from .vertical import GivenData

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

    def handle(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        """Answer a question of the setup or of a round.

        Raises
        ------
        DeclinedError
            If the policy does not allow it, or shares would be used twice.
        FieldRangeError
            If the weights have left the range of the field.
        LedgerError
            If the node's files cannot be used.
        InvalidParameterError, DataError, ProtocolError
            If the question is malformed, the data do not fit it, or a share is damaged.
        """
        if self.context is None:
            raise TypeError("FedVSClient needs the context: FedVSClient(data, context)")
        refuse_node_keys("message", fields)
        custody, question = Custody.of(self.context), question_of(phase, fields)
        self.check_unaccounted()
        simulated = is_simulated_client(self.context)
        session = CodedSession(custody, question, self._data, simulated=simulated)
        if phase == ENROL:
            return session.enrol(text_in(fields, "generation"))
        if phase == CODE:
            terms = records.read(CodeTerms, fields)
            self._check_terms(custody, question, terms)
            return session.code(terms, records.read(Chunk, fields), arrays, fields)
        if phase in (DEAL, DEAL_EVALUATION):
            return session.deal(records.read(Dealing, fields), arrays)
        if phase == ORACLE:
            if not simulated:
                raise DeclinedError("plain embeddings leave a client in simulations only")
            return session.embed_plainly(records.read(Chunk, fields))
        return session.answer(records.read(Evaluation, fields), arrays)

    def _check_terms(self, custody: Custody, question: Question, terms: CodeTerms) -> None:
        """Decline terms that this client or its node does not allow; all keys are those pinned."""
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
        custody.policy.check_sum(terms.least)
        place = terms.place(custody.client_id)
        name = key_name(question.experiment_id, terms.generation)
        if terms.keys[place] != own_pair(custody, self.scheme, name).public:
            raise ProtocolError("the key that is said to be this client's is not")
        if custody.pins is None:
            return
        for peer, key, signature in zip(terms.members, terms.keys, terms.signatures, strict=True):
            if peer != custody.client_id:
                check_signature(custody, self.scheme, name, peer, key, signature)


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
