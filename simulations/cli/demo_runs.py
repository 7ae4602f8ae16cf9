"""The runs of `make demo`: real data under each scheme, and what privacy costs there."""

from dataclasses import dataclass, replace

from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.settings.run_settings import Settings, TrainingSettings
from flwr_privacy.stragglers import StragglerModel

__all__ = ["TITLE", "DemoRun", "demo_runs"]

TITLE = "Federated learning with and without privacy"


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """A run of the demo.

    Parameters
    ----------
    about : str
        What it is, in a line.
    settings : Settings
        What it trains, and how.
    """

    about: str
    settings: Settings


def demo_runs() -> dict[str, DemoRun]:
    """Return the demo's runs by folder name: no privacy, a secure sum, and each scheme."""
    step_size = 4.0
    # One step a round on all records of a client, as UDP does.
    training = TrainingSettings(batch_size=1000, learning_rate=step_size)
    plain = Settings(task="digits-linear", clients=10, rounds=40, training=training)
    record = {"unit": "record", "clipping_norm": 0.5, "delta": 1e-5}
    udp = {**record, "learning_rate": step_size}
    deep = Settings(
        task="digits-mlp",
        clients=10,
        rounds=10,
        training=TrainingSettings(batch_size=16, learning_rate=0.3),
    )
    return {
        "no-privacy": DemoRun(
            about="Federated averaging: the server sees every update. The others are compared with "
            "it.",
            settings=plain,
        ),
        "udp-epsilon-8": DemoRun(
            about="UDP: each client adds noise to its own upload. The server cannot tell a single "
            "image (epsilon 8).",
            settings=replace(plain, scheme="udp", strategy={**udp, "epsilon": 8.0}),
        ),
        "udp-epsilon-2-shared-noise": DemoRun(
            about="UDP with a secure sum: the clients add the noise in shares, so that a smaller "
            "budget (epsilon 2) costs less.",
            settings=replace(
                plain,
                scheme="udp",
                strategy={**udp, "epsilon": 2.0, "shared_noise": True},
                secure_sum=SecureSum(),
            ),
        ),
        "m2fdp-epsilon-8": DemoRun(
            about="M2FDP: two trusted aggregators average 25 clients each and add the noise there "
            "(epsilon 8).",
            settings=_tree(plain, record),
        ),
        "acfl-epsilon-8": DemoRun(
            about="ACFL: coded data stand in for the gradients of stragglers; all uploads have "
            "noise (epsilon 8).",
            settings=_regression(),
        ),
        "secure-sum": DemoRun(
            about="Federated averaging with a secure sum: the server opens the sum of the updates "
            "and sees no single one. There is no noise.",
            settings=replace(deep, secure_sum=SecureSum()),
        ),
        "mspdq": DemoRun(
            about="MSPDQ with a secure sum: models are split, and travel as codes of eight bits.",
            settings=replace(deep, scheme="mspdq", secure_sum=SecureSum()),
        ),
        "fedvs": DemoRun(
            about="FedVS, on tumours and not on digits: each client has some columns of every "
            "record, and sends secret shares of them; the server sees sums of embeddings.",
            settings=Settings(
                scheme="fedvs",
                task="breast-cancer",
                clients=3,
                rounds=40,
                training=TrainingSettings(learning_rate=1.0),
            ),
        ),
    }


def _tree(common: Settings, record: dict[str, object]) -> Settings:
    """Return M2FDP with two trusted aggregators: fifty clients, as ten drown in the noise."""
    strategy = {
        **record,
        "epsilon": 8.0,
        "clipping_norm": 0.2,
        "sampling_rate": 0.2,
        "fanouts": (2, 25),
        "p": 1.0,
    }
    training = replace(common.training, batch_size=32, learning_rate=0.5)
    return replace(
        common, scheme="m2fdp", clients=50, rounds=10, training=training, strategy=strategy
    )


def _regression() -> Settings:
    """Return ACFL: a linear regression on Fourier features in which a fifth is ten times slower."""
    return Settings(
        scheme="acfl",
        task="digits-rff",
        clients=20,
        rounds=15,
        deadline=2.0,
        training=TrainingSettings(learning_rate=2.0),
        stragglers=StragglerModel(
            kind="lognormal", seconds=1.0, spread=0.5, slow_fraction=0.2, slowdown=10.0
        ),
        strategy={"noise": "record", "epsilon": 8.0, "delta": 1e-5, "clipping_norm": 0.25},
    )
