"""What is found in the messages of real rounds of MSP and MSPDQ, and in the images behind them."""

import math

import numpy as np
import pytest
from apps import make

from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.research.attacks.setup import AttackSetup
from flwr_privacy.simulations.research.mspdq.attack import setup_of
from flwr_privacy.simulations.research.mspdq.images import reconstruct, reconstruct_sum
from flwr_privacy.simulations.research.mspdq.mixing import layout_of, overhear, overhear_masked
from flwr_privacy.simulations.research.mspdq.models import Estimate, Views, views_of
from flwr_privacy.strategies import MSP, MSPDQ

CLIENTS = 3
ALL = {"min_train_nodes": CLIENTS, "min_available_nodes": CLIENTS}


@pytest.fixture(scope="module")
def setup() -> AttackSetup:
    return setup_of("digits-lenet", clients=CLIENTS, records=1, seed=0, data_root=None)


@pytest.fixture(scope="module")
def views(setup: AttackSetup) -> Views:
    return views_of(setup)


def named(views: Views, name: str) -> Estimate:
    (found,) = [estimate for estimate in views.estimates if estimate.name == name]
    return found


def error(views: Views, name: str) -> float:
    return views.error(named(views, name).models)


@pytest.mark.parametrize(
    "strategy",
    [
        make(MSP, mixing_rounds=3, **ALL),
        make(MSPDQ, bits=4, mixing_rounds=3, **ALL),
        make(MSPDQ, paper=True, replacement=False, mixing_rounds=3, **ALL),
    ],
)
def test_what_is_overheard_are_the_messages_whose_means_the_server_sends(
    setup: AttackSetup, strategy: MSP
) -> None:
    seen = overhear(setup, strategy)
    assert seen.messages.shape == (CLIENTS, 4, layout_of(setup).size)
    # The averages are sent in float32.
    np.testing.assert_allclose(
        seen.averages, seen.messages.mean(axis=0), atol=1e-6 * np.abs(seen.messages).max()
    )
    if strategy.terms.levels:
        moved = np.diff(seen.messages, axis=1) / seen.steps[:, :, None]
        from_knob = moved + (strategy.terms.levels - 1) / 2  # the interval lies around the last
        np.testing.assert_allclose(from_knob, np.rint(from_knob), atol=1e-6)
    if strategy.terms.start == "reference":
        assert (seen.messages[:, 0] == seen.messages[0, 0]).all()


def test_the_upload_of_federated_averaging_is_the_model(views: Views) -> None:
    assert error(views, "FedAvg: upload") == 0
    assert views.damage("FedAvg") < 1e-5


def test_a_first_message_hides_as_the_law_of_its_split_says(views: Views) -> None:
    # r - 1 is uniform on [-0.7, 0.7]: 0.4041 of the model. 5 standard errors of the mean square.
    count = CLIENTS * views.start.size
    for name in ("MSP: message 0", "MSPDQ 8: message 0"):
        read = views.error(named(views, name).models, of_update=False)
        assert abs(read**2 - 0.49 / 3) < 5 * math.sqrt(3 * 0.49**2 * 4 / 45 / count)
    assert error(views, "MSP+Lap: message 0") > 1000


def test_two_messages_give_the_model_away(views: Views) -> None:
    assert error(views, "MSP: 2 messages") < 1e-5
    assert error(views, "MSP+Lap: 2 messages") < 1e-2
    # Unless none of d = 9466 factors is within 0.01 of the end of their law: 10^-29.
    assert error(views, "MSP, secret gain: 2 messages, law") < 0.1
    assert 0.01 < error(views, "MSP, secret gain: conserved, 30") < 0.5


def test_rounding_to_fewer_bits_leaves_a_larger_error_and_a_small_one(views: Views) -> None:
    errors = [error(views, f"MSPDQ {bits}: all messages") for bits in (8, 6, 4)]
    assert errors == sorted(errors)
    assert errors[0] < 0.002
    assert errors[2] < 0.05
    assert views.damage("MSPDQ 4") < 0.05
    # What hides the models in the paper's setting spoils their mean as well.
    assert error(views, "MSPDQ 8, paper: all messages") > 0.3
    assert views.damage("MSPDQ 8, paper") > 1


def test_more_steps_tell_more(views: Views) -> None:
    conserved, *tracked = views.curves.values()
    assert len(conserved) == 30
    assert conserved[-1] == error(views, "MSP, secret gain: conserved, 30")
    assert conserved[-1] < 0.2 * conserved[0]
    for errors in tracked:
        assert len(errors) == 10
        assert (np.diff(errors) < 0).all()
    assert tracked[0][-1] == error(views, "MSPDQ 8: all messages")


def test_a_masked_vector_reads_as_codes_of_chance(setup: AttackSetup, views: Views) -> None:
    strategy = make(MSPDQ, secure_sum=SecureSum(), bound=0.25, **ALL)
    seen = overhear_masked(setup, strategy, clients=CLIENTS)
    levels = strategy.terms.levels
    codes = (seen.messages[:, 1] - seen.messages[:, 0]) / seen.steps + (levels - 1) / 2
    assert np.abs(codes - np.rint(codes)).max() < 1e-6
    counts = np.bincount(np.rint(codes).astype(int).reshape(-1), minlength=levels)
    assert len(counts) == levels
    # Every residue is as likely as any other; some codes have one residue more than others.
    half = 2 ** (strategy.bounds_of(["0", "1", "2"], 1).modulus_bits - 1)
    residues = np.arange(-half, half)
    expected = np.bincount((residues + levels // 2) % levels) * (codes.size / (2 * half))
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert abs(statistic - (levels - 1)) < 6 * math.sqrt(2 * (levels - 1))
    name = "MSPDQ 8, secure: masked"
    assert error(views, name) > 1
    assert abs(views.likeness(named(views, name).models)) < 5 / math.sqrt(
        CLIENTS * views.start.size
    )


def test_the_mean_that_is_opened_is_that_of_the_models(setup: AttackSetup, views: Views) -> None:
    assert list(views.sums) == [2, CLIENTS]
    for size, mean in views.sums.items():
        missed = mean - views.truth[:size].mean(axis=0)
        bound = 2.0 ** math.ceil(math.log2(np.abs(views.truth - views.start).max()))
        step = 4 * bound / 254  # of the interval of the one message, which holds twice the bound
        assert np.abs(missed).max() <= step
        assert 0.05 * step < missed.std() < step / math.sqrt(4 * size)  # rounding, averaged
    assert error(views, f"MSPDQ 8, secure: mean of {CLIENTS}") > 0.3


def test_images_are_found_where_models_are_and_nowhere_else(
    setup: AttackSetup, views: Views
) -> None:
    images = {
        name: reconstruct(setup, name, named(views, name).models)
        for name in (
            "FedAvg: upload",
            "MSP: message 0",
            "MSP: 2 messages",
            "MSPDQ 4: all messages",
            "MSPDQ 8, secure: masked",
        )
    }
    for name in ("FedAvg: upload", "MSP: 2 messages", "MSPDQ 4: all messages"):
        assert images[name].recovery.recovered.all()
        assert images[name].errors.max() < 1e-3
        np.testing.assert_allclose(images[name].found, setup.records(0, CLIENTS), atol=0.1)
        assert images[name].labels == CLIENTS
    for name in ("MSP: message 0", "MSPDQ 8, secure: masked"):
        assert not images[name].recovery.recovered.any()
        assert images[name].errors.min() > 0.05
        assert images[name].converged.all()  # it is not that the search failed
        assert images[name].found.min() >= 0
        assert images[name].found.max() <= 1


def test_a_mean_of_few_images_gives_them_away(setup: AttackSetup, views: Views) -> None:
    images = reconstruct_sum(setup, "mean", views.sums[2], clients=2)
    assert images.found.shape == (2, 64)
    assert images.recovery.recovered.all()
    assert images.labels is None
    np.testing.assert_allclose(images.found, setup.records(0, 2), atol=0.3)


def test_several_records_of_a_client_are_searched_for_together() -> None:
    setup = setup_of("digits-lenet", clients=2, records=2, seed=3, data_root=None)
    layout = layout_of(setup)
    models = np.array([layout.vector(setup.train(i, setup.start)) for i in range(2)])
    images = reconstruct(setup, "models", models)
    assert images.labels is None
    assert images.converged.shape == images.errors.shape == (4,)
    assert images.recovery.recovered.all()
    np.testing.assert_allclose(images.found, setup.records(0, 2), atol=0.1)
