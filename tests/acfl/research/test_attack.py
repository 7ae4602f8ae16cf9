"""What a server has of real trainings of ACFL, what is found in it, and what the command shows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from flwr_privacy.acfl.encoding import one_hot
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.acfl import attack as acfl
from flwr_privacy.simulations.research.acfl.linear_gradients import recover_moments
from flwr_privacy.simulations.research.acfl.regression import Devices, ServerView, listen
from flwr_privacy.simulations.research.acfl.solving import NOISED, PLAIN, SUMMED, Attacked, attack
from flwr_privacy.simulations.research.attack import ATTACKS
from flwr_privacy.simulations.research.attacks.setup import AttackOptions

DEVICES, RECORDS = 3, 12


@pytest.fixture(scope="module")
def devices() -> Devices:
    return Devices.of("digits-pixels", devices=DEVICES, records=RECORDS, seed=0)


@pytest.fixture(scope="module")
def heard(devices: Devices) -> ServerView:
    return listen(devices, noise="paper", rounds=12)


@pytest.fixture(scope="module")
def summed(devices: Devices) -> ServerView:
    return listen(devices, noise="paper", rounds=8, secure=True)


@pytest.fixture(scope="module")
def attacked(devices: Devices) -> Attacked:
    return attack(devices, longest=50)


def test_devices_have_digits_of_their_own_sorted_by_class(devices: Devices) -> None:
    own = devices.pixels.reshape(DEVICES * RECORDS, 64)
    assert len(np.unique(own, axis=0)) == len(own)
    assert (np.diff(devices.classes.reshape(-1)) >= 0).all()
    others = {x.tobytes() for x in devices.other_pixels}
    assert not any(x.tobytes() for x in own if x.tobytes() in others)
    np.testing.assert_array_equal(own * 16, np.rint(own * 16))
    assert devices.start.shape == (64, 10)


def test_what_is_kept_is_what_the_devices_computed(devices: Devices, heard: ServerView) -> None:
    assert heard.models.shape == (12, 64, 10)
    assert heard.gradients is not None
    np.testing.assert_array_equal(heard.models[0], devices.start)
    late = 0
    for index in range(DEVICES):
        X, Y = devices.pixels[index], one_hot(devices.classes[index], 10)
        for t, model in enumerate(heard.models):
            there = heard.answered[t, index]
            late += not there
            true = X.T @ (X @ model - Y) * there
            np.testing.assert_allclose(heard.gradients[t, index], true, atol=1e-9)
    assert late > 0  # 36 draws of 0.2, the same in every run
    np.testing.assert_allclose(heard.sums, heard.gradients.sum(axis=1), atol=1e-9)
    assert heard.terms.sigma == 0


def test_uploads_have_the_noise_that_was_asked_for(devices: Devices, heard: ServerView) -> None:
    errors = heard.each_upload.features - devices.moments.features
    sigma = heard.setup.sigma_features
    # d = 64, o = 10, one nat: 1 / (exp(1 / (63.5 + 5)) - 1), with the bounds of the entries at 1.
    assert sigma**2 == pytest.approx(1 / np.expm1(1 / 68.5), rel=1e-6)
    assert abs(errors.mean()) < 5 * sigma / np.sqrt(errors.size)
    assert abs(errors.std() / sigma - 1) < 5 / np.sqrt(2 * errors.size)
    np.testing.assert_allclose(heard.coded.features, heard.each_upload.features.sum(axis=0))


def test_under_a_secure_sum_the_server_has_sums_and_who_is_in_them(
    devices: Devices, summed: ServerView
) -> None:
    assert 2 <= len(summed.models) <= 8
    assert summed.gradients is None
    assert summed.uploads is None
    A, B = devices.moments
    for model, present, total in zip(summed.models, summed.answered, summed.sums, strict=True):
        assert present.sum() >= 2  # more than half
        true = (A[present] @ model - B[present]).sum(axis=0)
        step = 2.0**summed.terms.grid
        assert np.abs(total - true).max() <= present.sum() * step + 1e-9
    with pytest.raises(RuntimeError, match="nobody's gradient"):
        _ = summed.each_device
    with pytest.raises(RuntimeError, match="nobody's setup"):
        _ = summed.each_upload


def test_moments_and_images_are_given_away_by_a_few_answers(attacked: Attacked) -> None:
    upload, one, two, few, all_of_them = attacked.findings[PLAIN]
    # 3 answers have 20 directions, more than the 12 records; 8 have as many as there are pixels.
    names = ["1 answer", "2 answers", "3 answers", "8 answers"]
    assert [found.name for found in (one, two, few, all_of_them)] == names
    assert [f.rank for f in (one, two, few)] == ["0 of 64", "10 of 64", "20 of 64"]
    assert attacked.claimed["mi_epsilon"] == pytest.approx(1, rel=1e-3)
    assert upload.devices == one.devices == two.devices == 0
    assert np.median(upload.errors.features) > 1
    for found in (few, all_of_them):
        assert found.devices == DEVICES
        assert found.errors.features.max() < 1e-9
        assert found.errors.labels.max() < 1e-9
        assert found.auc == 1
        assert found.exact == DEVICES * RECORDS
    assert one.auc == 0.5
    assert upload.auc < 0.9


def test_a_secure_sum_delays_it(attacked: Attacked) -> None:
    even, half, _, last = attacked.findings[SUMMED]
    assert even.devices == half.devices == 0
    assert last.rank == f"{DEVICES * 74} of {DEVICES * 74}"
    # Sums are on a grid, and how well models tell devices apart depends on the noise: in ten runs
    # the median was 6e-4 to 1.1e-3, and 0.86 to 0.98 by half of the sums.
    assert np.median(last.errors.features) < 1e-2
    assert np.median(half.errors.features) > 0.5
    assert last.auc > 0.95
    rounds, errors = attacked.curves[SUMMED]
    assert rounds == sorted(rounds)
    assert errors[-1] == np.median(last.errors.features)


def test_noise_on_everything_leaves_nothing_that_this_finds(attacked: Attacked) -> None:
    *_, last = attacked.findings[NOISED]
    assert np.median(last.errors.features) > 1
    assert last.exact == last.devices == 0
    assert last.auc < 0.8
    errors = attacked.curves[NOISED][1]
    assert errors[-1] < errors[0]  # but more is known with every answer


def test_random_features_give_the_same_away() -> None:
    devices = Devices.of("digits-rff", devices=3, records=5, seed=1)
    heard = listen(devices, noise="paper", rounds=4)
    true = devices.moments
    assert true.features.shape == (3, 200, 200)
    for index, (models, gradients) in enumerate(heard.each_device):
        if len(models) < 2:
            continue
        found = recover_moments(models, gradients)
        error = np.linalg.norm(found.features - true.features[index])
        assert error < 1e-8 * np.linalg.norm(true.features[index])
        assert found.seen == 5


def test_the_command_prints_and_draws_it(
    attacked: Attacked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acfl, "attack", lambda devices: attacked)  # the one that is there
    options = AttackOptions(task="digits-pixels", clients=DEVICES, records=RECORDS, out=tmp_path)
    report = ATTACKS["acfl"](options)
    (table,) = report.tables
    assert table.row_count == 3 + 5 + 4 + 3
    assert "3 devices, records of each: 12, d = 64, o = 10" in str(table.title)
    errors, images = report.pictures
    assert [path.name for path in (errors, images)] == [
        "acfl-digits-pixels-errors.png",
        "acfl-digits-pixels.png",
    ]
    for path in (errors, images):
        picture = imread(path)
        assert picture.shape[0] > 300
        assert picture.std() > 0.01
    assert "protects one upload and not the training" in report.verdict
    assert "3 answers give all devices away" in report.verdict
    assert "36 of 36 images" in report.verdict


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"task": "digits-linear"}, "task = 'digits-linear'"),
        ({"clients": 2}, "clients = 2"),
        ({"records": 1000}, "records = 1000"),
        ({"seed": -1}, "seed = -1"),
    ],
    ids=["task", "clients", "records", "seed"],
)
def test_what_is_not_allowed_is_named(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        ATTACKS["acfl"](replace(AttackOptions(out=tmp_path), **change))
