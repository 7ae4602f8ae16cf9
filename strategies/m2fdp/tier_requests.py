"""Builds the requests of one exchange to a tree's devices, by lowest aggregator."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from flwr_privacy.m2fdp import (
    Exchange,
    M2FDPRoundPlan,
    M2FDPTerms,
    RecordNoise,
    TierSums,
    TreeModels,
)
from flwr_privacy.privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.privacy.forecast import Forecast
from flwr_privacy.strategies.requests.instruction import Instruction, to_each
from flwr_privacy.strategies.requests.ledger_heads import ChargeName
from flwr_privacy.strategies.requests.request_log import ClientReply
from flwr_privacy.strategies.state.experiment import to_record
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.layout import Layout
from flwr_privacy.wire.message import RECORD, Fields

from .relay import Relay
from .tier_charges import TierCharges

__all__ = ["WEIGHT", "TierRequests", "taken"]

WEIGHT = "num-examples"


@dataclass(frozen=True, eq=False)
class TierRequests:
    """The requests of one exchange, and their answers.

    Parameters
    ----------
    plan : M2FDPRoundPlan
        The round, with its noise.
    exchange : Exchange
        The exchange.
    drawn : Mapping of str to list of str
        The devices that are asked, by their parent.
    models : TreeModels
        The models of the tree.
    relay : Relay, optional
        Where aggregators are nodes of their own.
    """

    plan: M2FDPRoundPlan
    exchange: Exchange
    drawn: Mapping[str, list[str]]
    models: TreeModels
    relay: Relay | None

    @cached_property
    def groups(self) -> dict[str, str]:
        """The parent of each device that is asked."""
        return {device: leaf for leaf, devices in self.drawn.items() for device in devices}

    def of_groups(self, config_key: str, array_key: str, **told: float) -> dict[str, RecordDict]:
        """Return the content for the devices of each lowest aggregator alone.

        Parameters
        ----------
        config_key, array_key : str
            Names of the records with the training's configuration and with the model.
        **told
            What the training is told besides.
        """
        records: dict[int, ArrayRecord] = {}
        contents = {}
        for leaf, devices in self.drawn.items():
            sealed = self._sealed(leaf)
            fields = write(self.terms(leaf, devices if sealed else []))
            if sealed and self.relay is not None:
                fields |= self.relay.keys_for(leaf)
            config: dict[str, Any] = {
                "local-steps": self.exchange.leaves[leaf].steps,
                "learning-rate-scale": self.plan.scale,
                "segment": self.exchange.index,
                **{name.replace("_", "-"): value for name, value in told.items()},
            }
            content = RecordDict({RECORD: ConfigRecord(fields), config_key: ConfigRecord(config)})
            models, place = self.models, self.models.places[leaf]
            # Whoever has a zone of its own knows how far it has come since its public start.
            if place.start is not models.start or (place.offset is not None and not sealed):
                if id(place) not in records:
                    model = place.start if sealed else models.model(leaf)
                    records[id(place)] = to_record(dict(model))
                content[array_key] = records[id(place)]
            contents[leaf] = content
        return contents

    def instruction(
        self,
        charges: TierCharges,
        of_group: Mapping[str, RecordDict],
        statistics: Fields,
        template: Arrays,
        layout: Layout,
        forecast: Callable[[int], Forecast] | None,
    ) -> Instruction:
        """Return the exchange as the shared loop takes it.

        Parameters
        ----------
        charges : TierCharges
            What the devices pay.
        of_group : Mapping of str to RecordDict
            What goes to the devices of each lowest aggregator alone.
        statistics : dict
            What the devices are told of running statistics.
        template : Mapping of str to ndarray
            The arrays of the model.
        layout : Layout
            Those of them that are sent.
        forecast : callable, optional
            Says what the noise leaves of the training, where there is noise.
        """
        # A node that runs several devices needs these to add their codes up.
        kept = list(self.plan.keep_back)
        starts = {} if self.relay is None else self.relay.starts(self.groups)
        return Instruction(
            fields={**statistics, **({"keep-back": kept} if kept else {})},
            own=to_each(starts),
            groups=self.groups,
            of_group=of_group,
            accumulator=partial(TierSums, template, list(layout.parts), self.groups),
            take=self.take,
            adds_up=self.relay is None,
            cost=charges.costs(self.exchange),
            charged_as=self.charge_name,
            charged=charges.charged(self.exchange),
            forecast=forecast,
        )

    def charge_name(self, device: str) -> ChargeName:
        """Return the name under which a device's ledger has the charge of its answer."""
        return self._charge_names[self.plan.tree.parent(device)]

    @cached_property
    def _charge_names(self) -> dict[str, ChargeName]:
        """The same for the devices of each lowest aggregator, drawn or not."""
        names = {}
        for leaf in self.exchange.leaves:
            children = list(self.plan.tree.children(leaf)) if self._sealed(leaf) else []
            terms = self.terms(leaf, children)
            names[leaf] = ChargeName(terms.way, self.plan.server_round, terms.period)
        return names

    def _sealed(self, leaf: str) -> bool:
        return self.relay is not None and self.plan.tree.secure(leaf)

    def terms(self, leaf: str, siblings: list[str]) -> M2FDPTerms:
        """Return the round config of the devices of a lowest aggregator."""
        asked, plan = self.exchange.leaves[leaf], self.plan
        privacy = plan.privacy
        return M2FDPTerms(
            **plan.of_release(leaf, self.exchange),
            clipping_norm=plan.bound(asked.steps),
            steps=asked.steps,
            parent=leaf,
            noised=privacy.noised and not plan.tree.secure(leaf),
            sealed=bool(siblings),
            event=self.exchange.index,
            tier=self.exchange.tier,
            siblings=siblings,
            sampling_rate=float(privacy.rate) if isinstance(privacy, RecordNoise) else 1.0,
        )

    def take(self, mean: WeightedMean, reply: ClientReply) -> None:
        """Take a device's codes, or the message that it sealed for its parent.

        Raises
        ------
        ReplyRefusedError
            If the reply is malformed.
        """
        leaf = self.groups.get(reply.client_id, "")
        if self.relay is not None and leaf and self._sealed(leaf):
            if not isinstance(mean, TierSums) or reply.arrays():
                raise ReplyRefusedError("malformed", "arrays beside a sealed answer")
            mean.count(reply.client_id)
            self.relay.take(reply.client_id, reply.fields.get("sealed"))
            return
        mean.take(reply.client_id, reply.arrays(), reply.metrics(), WEIGHT)


def taken(sums: TierSums | None) -> Callable[[str], tuple[NDArray[Any], int] | None]:
    """Return a function that hands over the sum of a lowest aggregator, once."""
    return (lambda leaf: None) if sums is None else sums.taken
