"""What the schemes of this repository must pass beyond those of others: the app trains on Ray."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from apps import make

from flwr_privacy.simulations import testing
from flwr_privacy.simulations.runner.jobs import Engine, carry_out
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.testing.conformance import Killed
from flwr_privacy.strategies import SchemeStrategy

__all__ = ["Killed", "OwnClientConformance", "WrapsConformance", "dying"]


def dying(
    strategy: type[SchemeStrategy], server_round: int, by: type[BaseException] = Killed
) -> type[SchemeStrategy]:
    """Return a strategy whose process ends in a round, when all its updates have come."""

    class Dying(strategy):  # type: ignore[misc, valid-type]
        def aggregate_train(self, current: int, replies: Any) -> Any:
            if current == server_round:
                list(replies)
                raise by
            return super().aggregate_train(current, replies)

    return Dying


class _InTheApp(testing.SchemeConformance):
    """Schemes that the app of this repository may train.

    Attributes
    ----------
    registered : bool
        Whether the scheme is one of `flwr_privacy.simulations.settings.schemes` and trains the
        app's tasks.
    on_ray : bool
        Whether the app's training is tried on Ray, where it is registered: two nodes play its four
        clients.
    alone_on_ray : bool
        Whether it is tried on Ray with a node for each client too.
    app_options : dict
        Parameters of the strategy where the scheme trains the app's tasks.
    app_task : str
        Which of them.
    noise : float
        Largest difference that noise makes between two runs of the app.
    """

    registered: ClassVar[bool] = True
    on_ray: ClassVar[bool] = True
    alone_on_ray: ClassVar[bool] = False
    app_options: ClassVar[dict[str, Any]] = {}
    app_task: ClassVar[str] = "digits-mlp"
    noise: ClassVar[float] = 0.0

    def make(self, strategy: Any, *arguments: Any, **values: Any) -> Any:
        return make(strategy, *arguments, **values)

    @pytest.mark.ray
    def test_the_app_trains_alike_on_ray_inline_and_in_cohorts(
        self, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        if not (self.registered and self.on_ray):
            return
        request.getfixturevalue("one_ray_session")
        settings = Settings(
            scheme=self.strategy.scheme,
            task=self.app_task,
            clients=4,
            rounds=3,
            per_round=3,
            strategy=self.app_options,
        )
        inline = RunFolder.create(tmp_path / "inline", settings, engine="inline", nodes=4)
        cohorts = RunFolder.create(tmp_path / "cohorts", settings, engine="inline", nodes=2)
        on_ray = [
            RunFolder.create(tmp_path / f"ray-{nodes}", settings, engine="ray", nodes=nodes)
            for nodes in ((2, 4) if self.alone_on_ray else (2,))
        ]
        carry_out([inline], Engine(name="inline"))
        carry_out([cohorts], Engine(name="inline", workers=2))
        carry_out(on_ray, Engine(name="ray"))
        models = []
        for run in (inline, cohorts, *on_ray):
            with np.load(run.model_path) as archive:
                models.append(dict(archive))
            assert [line["accumulated"] for line in run.rounds()[1:]] == [3, 3, 3]
        for name, array in models[0].items():
            near = {"rtol": 1e-5, "atol": 1e-6 + self.noise}
            for other in models[1:]:
                np.testing.assert_allclose(other[name], array, **near)


class WrapsConformance(_InTheApp, testing.WrapsConformance):
    """For a scheme that wraps a user's app."""


class OwnClientConformance(_InTheApp, testing.OwnClientConformance):
    """For a scheme that brings its own client."""
