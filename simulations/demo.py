"""What `make demo` trains: real handwritten digits, four federations side by side."""

from flwr_privacy.simulations.settings import PartitionSettings, Settings, TrainingSettings
from flwr_privacy.stragglers import StragglerModel

__all__ = ["demo_settings"]


def demo_settings() -> dict[str, Settings]:
    """Return the settings of the demo's runs by folder name.

    An even split beside one where a client sees two labels; everybody in time beside a fifth of
    the clients ten times slower and a deadline of five virtual seconds that does not wait.
    """
    prompt = StragglerModel(seconds=1.0, spread=0.5)
    straggling = StragglerModel(seconds=1.0, spread=0.5, slow_fraction=0.2, slowdown=10.0)
    training = TrainingSettings(batch_size=16, learning_rate=0.3)
    common = Settings(task="digits-mlp", clients=20, rounds=15, training=training)
    return {
        f"{split}-{name}": common.with_values(
            {
                "partition.kind": kind,
                "stragglers": {
                    "seconds": model.seconds,
                    "spread": model.spread,
                    "slow_fraction": model.slow_fraction,
                    "slowdown": model.slowdown,
                },
                **({"deadline": 5.0} if name == "stragglers" else {}),
            }
        )
        for split, kind in (("iid", PartitionSettings().kind), ("skewed", "labels"))
        for name, model in (("prompt", prompt), ("stragglers", straggling))
    }
