"""Central differential privacy on the client: the user's training is what is clipped and noised.

What is released, in which order, and what it costs is the pipeline's
(`flwr_privacy.pipeline.answer`).
"""

from typing import ClassVar

from flwr_privacy.central_dp.mean import ClippedUpdate
from flwr_privacy.central_dp.terms import MEMBER, CentralDPTerms
from flwr_privacy.clients.node.base import Train
from flwr_privacy.clients.node.client_app import SchemeClientApp
from flwr_privacy.clients.node.private_evaluation import EvaluatingClient
from flwr_privacy.errors import ProtocolError
from flwr_privacy.pipeline.mechanism import Answer, ProtocolStep, Release
from flwr_privacy.pipeline.operator_checks import check_is_member
from flwr_privacy.pipeline.step_store import StepStore
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import METRICS, TRAIN, Fields

__all__ = ["CentralDPClient", "CentralDPClientApp"]


class CentralDPClient(EvaluatingClient):
    """Client half of `flwr_privacy.strategies.CentralDP`, around any training.

    Guarantee
    ---------
    As `flwr_privacy.strategies.CentralDP`. With noise in shares the client answers only within a
    secure sum of at least as many clients as the noise was planned for, charges its own ledger
    before its share leaves, and declines what would pass the budget of the experiment or the node's
    policy. With a committee it adds no noise, and answers only within a sum that opens with the
    noise of all members, whom its operator names and pins. With noise by the server its answers
    have none: a node whose policy limits epsilon or noise declines them, and its ledger does not
    have them: the trusted server accounts for them.
    A training that fails tells the server nothing that is not charged: see
    `flwr_privacy.pipeline.answer`.
    Not covered: a server that says of the clients of a sum what is not so (how often it draws them,
    that a roster of a sparse graph was drawn at random); the node's policy is what binds it, as far
    as a node can see: ``min_noise_multiplier``, ``max_epsilon``, ``min_summed``, ``max_cohort``.
    """

    scheme: ClassVar[str] = "central-dp"
    guarantees_dp: ClassVar[bool] = True
    sums: ClassVar[str] = "may"
    keeps_statistics: ClassVar[bool] = True

    def introduce(self, experiment_id: str) -> Fields:
        """Say in the hello whether this node is a member of a noise committee."""
        rules = self._rules()
        is_member = rules.client_id in (rules.policy.noise_members or ())
        return {MEMBER: True} if is_member else {}

    def release(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> Release | ProtocolStep:
        """Return the release of a training; of a committee's member the noise that it adds."""
        terms = records.read_terms(CentralDPTerms, fields)
        if terms.members and self._store().client_id in terms.members:
            return self._as_member(terms, arrays, fields)
        return Release(
            mechanism=ClippedUpdate(terms),
            work=lambda _, __: train(arrays).arrays,
            rehearsal=self.rehearsal(arrays, fields, train),
        )

    def _as_member(self, terms: CentralDPTerms, arrays: Arrays, fields: Fields) -> ProtocolStep:
        """Return the step of a member, which trains nothing."""
        from flwr_privacy.central_dp.member import member_noise  # late: few nodes are members

        check_is_member(self._store(), terms.members, fields)
        # Whatever the noise is: which noise a sum takes would say something of it.
        if fields["code-limit"] < (needed := terms.code_limit()):
            raise ProtocolError(
                f"the secure sum takes codes up to {fields['code-limit']}, the noise needs {needed}"
            )

        def add(lent: StepStore) -> Answer:
            codes = member_noise(
                lent.state,
                terms,
                arrays,
                server_round=lent.server_round,
                random=lent.random("noise"),
                check_room=lent.check_room,
            )
            return codes, {METRICS: {"num-examples": 1}}

        return ProtocolStep(work=add, summed=lambda _: None, of_data=False)

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return an empty sum of codes for a training."""
        if phase != TRAIN:
            return super().accumulator(phase, arrays, fields)
        return ClippedUpdate(records.read_terms(CentralDPTerms, fields)).accumulator(arrays)


class CentralDPClientApp(SchemeClientApp):
    """Flower's ClientApp with `CentralDPClient` around it; see `SchemeClientApp`."""

    scheme_client = CentralDPClient
