"""Describes one exchange as data: fields to send, how answers add up, what an answer costs."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from flwr.app import ConfigRecord, RecordDict

from flwr_privacy.accounting import Charge
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.forecast import Forecast
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import RECORD, Fields

from .ledger_heads import ChargeName
from .request_log import ClientReply, RequestLog

__all__ = ["Instruction", "noting", "to_each"]


Take = Callable[[WeightedMean, ClientReply], None]
"""Adds the reply of one client to an accumulator."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One exchange of a scheme, as data, which the shared loop carries out and charges.

    Parameters
    ----------
    accumulator : callable
        Returns an empty accumulator for the answers.
    fields : dict, optional
        The scheme's own values that all clients get.
    own : dict, optional
        For some clients, records that go to that client alone (`to_each`).
    groups : dict, optional
        The group of each client, in a scheme that sums by groups.
    of_group : dict, optional
        For some groups, records that go to their clients alone.
    take : callable, optional
        Adds the reply of one client to the accumulator, or raises ReplyRefusedError and leaves it
        unchanged. By default the reply's arrays are added with the client's weight.
    adds_up : bool, optional
        Whether a node that runs several clients answers with one accumulator. By default only
        where there is no `take`.
    cost : callable, optional
        From a client's name to what one answer costs it; None for a client that pays nothing. By
        default the answers release nothing that the scheme accounts for.
    charged : callable, optional
        From what became of the request to the clients that pay. By default those who were asked and
        did not say that they released nothing.
    charged_as : callable, optional
        From a client's name to the name under which its ledger has the charge
        (`flwr_privacy.pipeline.mechanism.Release.name`); by default that of the question.
    hidden : bool, default False
        Whether who is asked is a secret, so that everybody is charged. The privacy card does not
        say then who did not answer: it would tell of some that they were asked.
    large : bool, default False
        Whether an answer may be much larger than its request.
    again : bool, default False
        Whether the clients in a secure sum send another vector of the same round afterwards.
    released : callable, optional
        From the accumulator (None where no answer could be used) to what leaves the shared loop:
        noise of the server is added here, so nobody sees a sum without it. None skips the round.
    failed_sigma : callable, optional
        Where it is counted how many trainings failed (`flwr_privacy.privacy.failures`): from
        clients to the standard deviation of the count in a sum of their answers.
    forecast : callable, optional
        From the number of clients in a round to what the noise leaves of the training. By default
        there is no noise, or nothing to compare it with.
    finish : callable, optional
        From what was released to the arrays of the new model, in `aggregate_train`. By default the
        mean. A program that calls `ask` makes the model by itself.
    """

    accumulator: Callable[[], WeightedMean]
    fields: Fields = field(default_factory=dict)
    own: Mapping[str, RecordDict] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    of_group: Mapping[str, RecordDict] = field(default_factory=dict)
    take: Take | None = None
    adds_up: bool | None = None
    cost: Callable[[str], Charge | None] | None = None
    charged: Callable[[RequestLog], set[str]] = lambda asked: set(asked.released())
    charged_as: Callable[[str], ChargeName] | None = None
    hidden: bool = False
    large: bool = False
    again: bool = False
    released: Callable[[WeightedMean | None], WeightedMean | None] = lambda mean: mean
    failed_sigma: Callable[[Collection[str]], float] | None = None
    forecast: Callable[[int], Forecast] | None = None
    finish: Callable[[WeightedMean], Arrays] = lambda mean: mean.finish()

    def costs(
        self, request_log: RequestLog, clients: Iterable[str]
    ) -> dict[str, tuple[ChargeName, Charge]]:
        """Return what a request costs some clients, each with the name of its charge."""
        if self.cost is None:
            return {}
        charges = {client: self.cost(client) for client in clients}
        return {
            client: (request_log.charged_as(client), charge)
            for client, charge in charges.items()
            if charge is not None
        }


def to_each(values: Mapping[str, Fields]) -> dict[str, RecordDict]:
    """Return the values for single clients as records that are sent to them alone."""
    return {name: RecordDict({RECORD: ConfigRecord(fields)}) for name, fields in values.items()}


def noting(
    instruction: Instruction, usual: Take, note: Callable[[ClientReply], None]
) -> Instruction:
    """Return an instruction that adds each reply separately and then passes it to a function.

    Parameters
    ----------
    instruction : Instruction
        The instruction.
    usual : callable
        Adds a reply where the instruction does not say how: `SchemeStrategy.take`.
    note : callable
        Gets every reply.
    """
    take = instruction.take or usual

    def noted(mean: WeightedMean, reply: ClientReply) -> None:
        take(mean, reply)
        note(reply)

    return replace(instruction, take=noted, adds_up=False)
