"""A scheme that brings its own client passes its conformance class, and learns."""

import numpy as np
from apps import record
from conformance import OwnClientConformance
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from gradient_scheme import FEATURES, TRUTH, GradientStrategy, gradient_app


class TestGradients(OwnClientConformance):
    strategy = GradientStrategy
    registered = False

    def app(self) -> ClientApp:
        return gradient_app()

    def arrays(self) -> ArrayRecord:
        return record({"w": np.zeros(FEATURES, np.float32)})

    def test_it_learns(self) -> None:
        weights = self.run(num_rounds=60).arrays["w"].numpy()
        np.testing.assert_allclose(weights, TRUTH, atol=1e-3)
