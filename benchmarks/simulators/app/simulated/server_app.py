"""The server app: runs the parts of a plan in order and writes down what it measured.

flower       Flower's FedAvg, a node per client
flower-dp    the same in Flower's wrapper for central DP with fixed clipping
fedavg       this library's FedAvg
secure-sum   the same under a secure sum
central-dp   its central DP with a trusted server
shares       its central DP with noise in shares of the clients, under a secure sum
udp          UDP at user level
mspdq        MSPDQ with four mixing steps
m2fdp        M2FDP over a tree of ten aggregators, half of them trusted
"""

from functools import partial
from typing import Any

from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, Strategy
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from flwr_privacy.m2fdp import TierTree
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import (
    M2FDP,
    MSPDQ,
    UDP,
    CentralDP,
    DeviceNoise,
    DistributedNoise,
    FedAvg,
    LoopOptions,
    SchemeResult,
    ServerNoise,
    UserLevel,
)

from . import work

__all__ = ["app"]

TIMEOUT = 600.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the plan."""
    config = context.run_config
    size, rounds = str(config["size"]), int(config["rounds"])
    for part in str(config["plan"]).split():
        strategy = _strategy(
            part, work.TASKS[size], sigma=float(config["sigma"]), virtual=bool(config["virtual"])
        )
        clock = work.Clock(size, started=float(config["started"]))

        def end_of_round(server_round: int, arrays: ArrayRecord, clock: work.Clock = clock) -> None:
            if server_round > 0:
                clock.round_ends(arrays.to_torch_state_dict)

        result = strategy.start(
            grid,
            ArrayRecord(work.model_of(size).state_dict()),
            num_rounds=rounds,
            timeout=TIMEOUT,
            evaluate_fn=end_of_round,
        )
        if isinstance(result, SchemeResult):
            answers = [line["answered"] for line in result.history[1:]]
            if answers != [work.TASKS[size].cohort] * rounds:
                raise RuntimeError(f"{part}: {answers} clients answered in the rounds")
        clock.write(str(config["out"]), part, work.Data(str(config["data"])))


def _strategy(part: str, task: work.Task, *, sigma: float, virtual: bool) -> Strategy:
    asked: dict[str, Any] = {
        "fraction_train": task.cohort / task.clients,
        "fraction_evaluate": 0.0,
        "min_train_nodes": task.cohort,
        "min_available_nodes": 1 if virtual else task.clients,
    }
    if part.startswith("flower"):
        all_trained = partial(_all_trained, cohort=task.cohort)
        flowers = FlowerFedAvg(train_metrics_aggr_fn=all_trained, **asked)
        if part == "flower":
            return flowers
        return DifferentialPrivacyServerSideFixedClipping(
            flowers, sigma / work.CLIPPING_NORM, work.CLIPPING_NORM, task.cohort
        )
    asked["loop"] = LoopOptions(clients=task.clients if virtual else None)
    budget: dict[str, Any] = {
        "epsilon": work.EPSILON,
        "delta": work.DELTA,
        "clipping_norm": work.CLIPPING_NORM,
    }
    if part == "fedavg":
        return FedAvg(**asked)
    if part == "secure-sum":
        return FedAvg(secure_sum=SecureSum(), **asked)
    if part == "central-dp":
        # As the rivals do: random cohorts, and noise of its own in each round.
        privacy = ServerNoise(**budget, sampling="fixed", correlated=None)
        return CentralDP(privacy=privacy, rounds=work.BUDGETED_ROUNDS, **asked)
    if part == "shares":
        shared = DistributedNoise(**budget, sampling="fixed")
        return CentralDP(
            privacy=shared, rounds=work.BUDGETED_ROUNDS, secure_sum=SecureSum(), **asked
        )
    if part == "udp":
        return UDP(privacy=UserLevel(**budget), rounds=work.BUDGETED_ROUNDS, **asked)
    if part == "mspdq":
        return MSPDQ(mixing_rounds=4, **asked)
    if part == "m2fdp":
        tree = TierTree.of_fanouts((10, task.clients // 10), p=0.5)
        return M2FDP(tree=tree, privacy=DeviceNoise(**budget), **asked)
    raise ValueError(f"unknown part {part!r}")


def _all_trained(records: list[RecordDict], weighted_by: str, *, cohort: int) -> MetricRecord:
    """Return the number of answers as a metric; all that were asked must have answered."""
    if len(records) != cohort:
        raise RuntimeError(f"{len(records)} clients answered")
    return MetricRecord({"answered": len(records)})
