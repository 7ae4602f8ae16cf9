"""FedVS passes what every scheme that brings its own client must pass."""

from typing import Any, ClassVar

import vertical
from conformance import OwnClientConformance
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp

from flwr_privacy.strategies import FedVS


class _Conformance(OwnClientConformance):
    strategy = FedVS
    on_ray: ClassVar[bool] = False
    engine: ClassVar[dict[str, Any]] = {"insecure_seed": 5}
    # The sums are of integers, and those of a cohort are decoded from the same answers.
    exact_cohorts = True
    codes = True
    each_counts = False  # a sum is opened as soon as enough have answered
    fraction = 1.0  # all clients take part
    paper: ClassVar[bool] = False

    def app(self) -> ClientApp:
        return vertical.app(4, paper=self.paper)

    def run(self, **changes: Any) -> Any:
        if "run_dir" in changes:  # a resumed run meets nodes that remember the setup
            state = changes["run_dir"] / "nodes"
            state.mkdir(exist_ok=True)
            changes["state"] = state
        return super().run(**changes)

    def arrays(self) -> ArrayRecord:
        return vertical.arrays()


# The roundings of the weights are drawn for an experiment, so a run that is repeated has its name.
# With a spare answer all four are waited for: a cohort answers for all of its clients at once.
ALL = {"experiment_id": "e", "spare": 1}


class TestHardened(_Conformance):
    options: ClassVar[dict[str, Any]] = vertical.options(4, **ALL)


class TestAsPrinted(_Conformance):
    """Without zero masks and bounds; in a smaller field, with sums in place of means."""

    paper = True
    options: ClassVar[dict[str, Any]] = vertical.options(
        4, **ALL, paper=True, prime=4194301, data_bits=5, weight_bits=6, aggregation="sum"
    )
