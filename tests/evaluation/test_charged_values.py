"""What a training stops by or changes by: the server's own data, or what clients were charged for.

Each run is done twice, with the same noise and with other metrics in the app. Whatever a server
could stop or choose by is the same in both, or the clients were charged for it, or the guarantee
says that it is not protected.
"""

from typing import Any

import numpy as np
import pytest
from apps import make, record, run_strategy, step
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy import clients, strategies
from flwr_privacy.clients import CentralDPClient, M2FDPClient, SchemeClient, UDPClient, as_mod
from flwr_privacy.keywords import option_types
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.strategies import (
    ACFL,
    M2FDP,
    UDP,
    CentralDP,
    FedVS,
    SchemeStrategy,
    SplitVFL,
)

pytestmark = pytest.mark.usefixtures("no_pld")

TREE = TierTree.of_fanouts((2, 2), p=0.5)
CHARGED, SERVERS, SAID = "charged", "the server's own", "said to be unprotected"


def app_of(client: type[SchemeClient], shift: float) -> ClientApp:
    """Return an app of which all metrics are moved by a number, and no update is."""
    app = ClientApp(mods=[as_mod(client)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        arrays = {n: a.numpy() for n, a in message.content["arrays"].items()}
        trained = record({name: step(array, number) for name, array in arrays.items()})
        metrics = MetricRecord({"num-examples": 1 + int(10 * shift), "loss": 3.0 + shift})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = {"num-examples": 8, "accuracy": 0.1 + shift, "loss": 2.0 - shift}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def norm(server_round: int, arrays: Any) -> float:
    """A validation on the server: of the model alone."""
    return float(sum(np.abs(array.numpy()).sum() for array in arrays.values()))


LOSSES = {"schedule": "discounting", "validation": "clients"}
CASES: list[tuple[type[Any], type[SchemeClient], dict[str, Any], str]] = [
    (UDP, UDPClient, {}, SERVERS),
    (UDP, UDPClient, {"schedule": "discounting", "validation": norm}, SERVERS),
    (UDP, UDPClient, {"schedule": "plateau", "validation": norm}, SERVERS),
    (UDP, UDPClient, {"schedule": "linear"}, SERVERS),
    (UDP, UDPClient, LOSSES, CHARGED),
    (UDP, UDPClient, {"schedule": "plateau", "validation": "clients"}, CHARGED),
    (UDP, UDPClient, {**LOSSES, "noise": "paper"}, SAID),
    (UDP, UDPClient, {**LOSSES, "noise": "none"}, SAID),
    (UDP, UDPClient, {"evaluation": "private", "loss_cap": 4.0}, CHARGED),
    (CentralDP, CentralDPClient, {}, SERVERS),
    (CentralDP, CentralDPClient, {"quantile": 0.5}, SERVERS),
    (CentralDP, CentralDPClient, {"evaluation": "private"}, CHARGED),
    (M2FDP, M2FDPClient, {"tree": TREE}, SERVERS),
    (
        M2FDP,
        M2FDPClient,
        {"tree": TREE, "control": "adaptive", "total_steps": 9, "max_steps": 4, "steps": 3},
        SERVERS,
    ),
    (M2FDP, M2FDPClient, {"tree": TREE, "evaluation": "private"}, CHARGED),
]


@pytest.mark.parametrize(("kind", "client", "options", "by"), CASES)
def test_a_training_stops_and_chooses_by_nothing_that_is_not_paid_for(
    kind: type[Any], client: type[SchemeClient], options: dict[str, Any], by: str
) -> None:
    seen = []
    for shift in (0.0, 0.7):
        own = {"insecure_seed": 3} if kind is M2FDP else {}
        values = {"experiment_id": "e", "seed": 1, "fraction_evaluate": 1.0, **own, **options}
        if values.get("noise") != "none":
            values["epsilon"] = 1e4  # the noise does not hide what it could
        rounds: list[dict[str, Any]] = []
        chosen = make(kind, **values, on_round=rounds.append)
        result = run_strategy(chosen, app_of(client, shift), num_rounds=3, insecure_seed=5)
        lines = [
            {k: v for k, v in line.items() if k != "seconds" and not k.endswith(("_up", "_down"))}
            for line in rounds
        ]
        metrics = [result.train_metrics_clientapp, result.evaluate_metrics_clientapp]
        model = {name: array.numpy().tolist() for name, array in result.arrays.items()}
        seen.append(repr((lines, metrics, model, chosen.stop())))
        promise = chosen.guarantee()
        paid = {release.phase for release in chosen.releases}
    assert (seen[0] != seen[1]) == (by != SERVERS)
    assert ("evaluate" in paid) == (by == CHARGED)
    told = any(text.startswith("unprotected_test_loss") for text in promise.not_protected)
    assert (told or promise.protects.startswith("nothing")) == (by == SAID)


def test_the_list_has_every_option_that_a_training_is_steered_by() -> None:
    """Another kind belongs into the cases above, or among those that follow clients' values not."""
    steering = {
        (kind.__name__, field): {option.__name__ for option in options}
        for kind in (UDP, CentralDP, M2FDP, ACFL)
        for field, options in option_types(kind).items()
        if field not in ("loop", "secure_sum", "inner", "privacy", "tree", "resources", "data")
    }
    assert steering == {
        ("UDP", "schedule"): {"Discounting", "LinearNoise", "PlateauNoise"},
        ("UDP", "evaluation"): {"PrivateEvaluation"},
        ("CentralDP", "clipping"): {"AdaptiveClipping"},  # by a count that is charged with updates
        ("CentralDP", "evaluation"): {"PrivateEvaluation"},
        ("M2FDP", "schedule"): {"EventSchedule"},  # numbers of steps
        ("M2FDP", "control"): {"AdaptiveControl"},
        ("M2FDP", "evaluation"): {"PrivateEvaluation"},
        ("ACFL", "weighting"): {"Weighting"},  # by noised gradients, and by who answers
        ("ACFL", "evaluation"): {"PrivateEvaluation"},
    }


def test_no_metrics_of_the_app_leave_a_client_of_a_scheme_with_a_budget() -> None:
    halves = [getattr(clients, name) for name in clients.__all__]
    promising = {
        half.scheme
        for half in halves
        if isinstance(half, type) and issubclass(half, SchemeClient) and half.guarantees_dp
    }
    kinds = [getattr(strategies, name) for name in strategies.__all__]
    servers = {
        kind.scheme: kind
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, SchemeStrategy) and "scheme" in vars(kind)
    }
    assert {"udp", "central-dp", "m2fdp", "acfl"} <= promising
    for scheme in promising:
        assert servers[scheme].metrics_phases == frozenset(), scheme
    assert {FedVS, SplitVFL}.isdisjoint(servers[scheme] for scheme in promising)
