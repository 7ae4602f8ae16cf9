"""The runs of `make demo`: real handwritten digits, with and without privacy."""

from dataclasses import replace

from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.settings.run_settings import (
    PartitionSettings,
    Settings,
    TrainingSettings,
)
from flwr_privacy.stragglers import StragglerModel

__all__ = ["ABOUT", "TITLE", "demo_settings"]

TITLE = "Federated learning on digits, with and without privacy"

ABOUT = (
    "Ten clients with 143 or 144 images each train a logistic regression. Against a server that "
    "sees every upload they add noise, which protects each single image: once within a loose "
    "budget (epsilon 8), once within a tight one (epsilon 2), and for comparison the same steps "
    "without clipping and noise. The tight budget is spent in two more ways: on fewer rounds, as "
    "the loss on the test images stops falling (discounted), and with noise that the clients of a "
    "secure sum share, so that the sum has no more of it than it needs (shared-noise). The noise "
    "is drawn anew every time, and the accuracies under privacy differ from one demo to the next. "
    "To protect all images of a client at once in this "
    "way takes so much noise that ten clients are left with guessing (flwr-privacy run --scheme "
    "udp --task digits-linear --clients 10 --rounds 60 --set unit=user): that needs many more of "
    "them, who share the noise. The runs on "
    "digits-mlp are federated averaging, which protects nothing: evenly split beside two labels "
    "per client, everybody in time beside stragglers. One of them has a secure sum: the "
    "server opens the sum over those who are in time and sees no single upload; where too few are "
    "left it opens nothing. The two of mspdq send codes of eight bits: once in four mixing steps, "
    "in which the server sees every client's codes and learns its model, once in a single step "
    "under a secure sum, with fewer bytes than federated averaging and sums in place of codes. The "
    "three on digits-rff are linear regressions on Fourier features, with stragglers: one waits "
    "for everybody, two go on after two virtual seconds with coded data in place of those who are "
    "missing (acfl). As printed that hides nothing from the server, which learns X^T X of every "
    "client from its gradients; with noise on everything each image is protected (epsilon 8)."
)


def demo_settings() -> dict[str, Settings]:
    """Return the settings of the demo's runs by folder name."""
    return {**_budgets(), **_federations(), **_regressions()}


def _budgets() -> dict[str, Settings]:
    """Return budgets of a record, and the same steps without clipping and noise."""
    step_size = 4.0
    # One step a round on all records of a client, as the scheme does.
    training = TrainingSettings(batch_size=1000, learning_rate=step_size)
    common = Settings(task="digits-linear", clients=10, rounds=60, training=training)
    scheme = {"unit": "record", "learning_rate": step_size, "clipping_norm": 0.5, "delta": 1e-5}
    return {
        "no-privacy": common,
        **{
            f"udp-epsilon-{epsilon:g}": replace(
                common, scheme="udp", strategy={**scheme, "epsilon": epsilon}
            )
            for epsilon in (8.0, 2.0)
        },
        "udp-epsilon-2-discounted": replace(
            common, scheme="udp", strategy={**scheme, "epsilon": 2.0, "schedule": "discounting"}
        ),
        "udp-epsilon-2-shared-noise": replace(
            common,
            scheme="udp",
            strategy={**scheme, "epsilon": 2.0, "shared_noise": True},
            secure_sum=SecureSum(),
        ),
    }


def _federations() -> dict[str, Settings]:
    """Return federated averaging under good and bad conditions.

    An even split beside one where a client sees two labels; everybody in time beside a fifth of
    the clients ten times slower and a deadline of five virtual seconds that does not wait.
    """
    training = TrainingSettings(batch_size=16, learning_rate=0.3)
    prompt = StragglerModel(seconds=1.0, spread=0.5)
    straggling = replace(prompt, slow_fraction=0.2, slowdown=10.0)
    common = Settings(
        task="digits-mlp", clients=20, rounds=15, training=training, stragglers=prompt
    )
    slow = replace(common, stragglers=straggling, deadline=5.0)
    skewed = PartitionSettings(kind="labels")
    return {
        "iid-prompt": common,
        "iid-stragglers": slow,
        "iid-stragglers-secure-sum": replace(slow, secure_sum=SecureSum()),
        "iid-mspdq": replace(common, scheme="mspdq", strategy={"mixing_rounds": 4}),
        "iid-mspdq-secure-sum": replace(common, scheme="mspdq", secure_sum=SecureSum()),
        "skewed-prompt": replace(common, partition=skewed),
        "skewed-stragglers": replace(slow, partition=skewed),
    }


def _regressions() -> dict[str, Settings]:
    """Return linear regressions that wait for stragglers, or have coded data in their place."""
    training = TrainingSettings(learning_rate=3.0)
    straggling = StragglerModel(
        kind="lognormal", seconds=1.0, spread=0.5, slow_fraction=0.2, slowdown=10.0
    )
    common = Settings(
        scheme="acfl", task="digits-rff", clients=20, training=training, stragglers=straggling
    )
    exact = {"noise": "none", "alpha": 0.0, "straggler_rate": 0.0, "ridge": 1.0}
    printed = {"noise": "variances", "sigma1_sq": 0.01, "sigma2_sq": 0.01, "ridge": 1.0}
    protected = {"noise": "record", "epsilon": 8.0, "delta": 1e-5, "clipping_norm": 0.25}
    return {
        "regression-wait-for-all": replace(common, rounds=40, strategy=exact),
        "acfl-as-printed": replace(common, rounds=40, deadline=2.0, strategy=printed),
        "acfl-epsilon-8": replace(
            common,
            rounds=15,
            deadline=2.0,
            strategy=protected,
            training=replace(training, learning_rate=2.0),
        ),
    }
