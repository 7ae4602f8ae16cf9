import subprocess
import sys

import numpy as np
import pytest
from scipy.signal import lfilter

from flwr_privacy.central_dp.correlated import optimisation
from flwr_privacy.central_dp.correlated.errors import prefix_error, relative_error
from flwr_privacy.central_dp.correlated.factors import LARGEST_SUM, BufferedToeplitzFactor
from flwr_privacy.central_dp.correlated.options import BLT, BandedMF, TreeNoise
from flwr_privacy.central_dp.correlated.sensitivity import joint_sensitivity
from flwr_privacy.errors import InvalidParameterError, KeywordError

# jax_privacy 2.3.0.dev0 (commit 8967688), jax 0.10.2, 64-bit floats: c / c[0] of
# c = toeplitz.optimize_banded_toeplitz(rounds, bands, max_optimizer_steps=5000), and
# toeplitz.loss(c, rounds), the mean squared error times the squared norm.
BANDED = {
    (37, 5): (
        6.0414813900686735,
        [1.0, 0.5989427493070486, 0.48211845339201187, 0.41045882398361866, 0.3515378369232586],
    ),
    (100, 10): (
        8.681873898575267,
        [
            *(1.0, 0.5915063754811198, 0.48650689711128897, 0.43047399629532673),
            *(0.3922853993388832, 0.3626719534326836, 0.3376744423238272, 0.3150913388322568),
            *(0.29322684162548, 0.2698129329169717),
        ],
    ),
    (200, 20): (
        9.963092468193219,
        [
            *(1.0, 0.5617409997885155, 0.45366788758272597, 0.3992584664136174),
            *(0.36457318492176166, 0.33958568305267695, 0.320170764726879, 0.30428547415159074),
            *(0.2907871737222446, 0.27897779206152795, 0.2684000528906233, 0.25873579664394947),
            *(0.24975043284806456, 0.2412597615225721, 0.23310774117009386, 0.2251485567301075),
            *(0.21722716150289717, 0.2091485370225995, 0.20060667575220198, 0.1909308198234837),
        ],
    ),
}


def product(factor, **setting):
    return joint_sensitivity(factor, **setting) * prefix_error(factor, rounds=setting["rounds"])


@pytest.mark.parametrize(("rounds", "bands"), BANDED)
def test_the_best_bands_are_those_of_jax_privacy(rounds, bands):
    loss, column = BANDED[rounds, bands]
    ours = optimisation._banded_optimum(optimisation._Setting(rounds, bands, 1), bands)
    assert ours == pytest.approx(column, abs=1e-6)
    setting = {"rounds": rounds, "separation": bands, "participations": 1}
    factor = BandedMF().factor(**setting)
    assert factor.column(bands) == pytest.approx(column, abs=1e-6 + 2**-17)
    assert product(factor, **setting) ** 2 == pytest.approx(loss, rel=1e-8)


def test_the_best_buffers_are_as_good_as_those_of_jax_privacy():
    # As above: sensitivity times root mean squared error of buffered_toeplitz.optimize(n=200,
    # min_sep=20, max_participations=10, min_buffers=1, max_buffers=1, error="mean"); 2 and 3
    # buffers are no better.
    setting = {"rounds": 200, "separation": 20, "participations": 10}
    factor = BLT(buffers=1).factor(**setting)
    assert product(factor, **setting) == pytest.approx(10.584683078133683, rel=1e-6)
    assert factor.decays[0] / 2**16 == pytest.approx(0.9098136079594459, abs=1e-4)
    assert factor.scales[0] / 2**16 == pytest.approx(0.5117533797837444, abs=1e-4)


@pytest.mark.parametrize(
    ("rounds", "separation", "participations", "excess"),
    [(100, 10, 10, 0.065), (200, 20, 10, 0.065), (1000, 100, 10, 0.055), (500, 500, 1, 0.005)],
)
def test_buffers_are_nearly_as_good_as_bands(rounds, separation, participations, excess):
    setting = {
        "rounds": rounds,
        "separation": separation,
        "participations": participations,
    }
    bands, buffers = (
        relative_error(options.factor(**setting), **setting) for options in (BandedMF(), BLT())
    )
    assert bands < buffers < bands * (1 + excess)


def test_buffers_beat_bands_where_a_participant_comes_back_soon_but_rarely():
    setting = {"rounds": 300, "separation": 10, "participations": 2}
    bands, more, buffers = (
        relative_error(options.factor(**setting), **setting)
        for options in (BandedMF(), BandedMF(bands=60), BLT())
    )
    assert buffers < more < bands


def test_more_bands_than_the_separation_are_optimised_too():
    setting = {"rounds": 300, "separation": 20, "participations": 3}
    narrow, wide = (
        1 / relative_error(BandedMF(bands=bands).factor(**setting), **setting) for bands in (20, 60)
    )
    assert narrow == pytest.approx(3.3876, abs=1e-4)
    assert wide == pytest.approx(3.4894, abs=1e-4)  # from several starts, to 1e-9 of the loss


def test_no_more_buffers_are_used_than_help():
    assert len(BLT(buffers=5).factor(rounds=100, separation=10, participations=10).scales) == 1
    single = {"rounds": 400, "separation": 400, "participations": 1}
    assert len(BLT(buffers=2).factor(**single).scales) == 2
    assert len(BLT(buffers=3).factor(**single).scales) == 3


@pytest.mark.parametrize("rounds", [1, 2, 8, 20])
@pytest.mark.parametrize("separation", [1, 5, 7])
def test_optimised_is_never_worse(rounds, separation):
    for participations in (2, 20):
        setting = {
            "rounds": rounds,
            "separation": separation,
            "participations": participations,
        }
        best, plain, buffered = (
            relative_error(options.factor(**setting), **setting)
            for options in (BandedMF(), BandedMF(optimised=False), BLT(buffers=2))
        )
        assert best <= plain * (1 + 1e-7)
        assert best <= 1 + 1e-7
        assert buffered <= 1 + 1e-4


@pytest.mark.parametrize(("rounds", "bands", "separation", "participations"), [
    (30, 4, 4, 8), (31, 9, 4, 3), (12, 12, 5, 2),
])  # fmt: skip
def test_the_gradient_is_that_of_small_differences(rounds, bands, separation, participations):
    setting = optimisation._Setting(rounds, separation, participations)

    def loss(column):
        return setting.loss(column, lambda y: lfilter([1.0], column, y))

    column = optimisation._square_root(bands) * 0.9 + 0.1
    differences = [
        (loss(column + step)[0] - loss(column - step)[0]) / 2e-6 for step in 1e-6 * np.eye(bands)
    ]
    assert loss(column)[1] == pytest.approx(differences, abs=1e-7)


def test_the_minimised_function_is_error_times_sensitivity():
    setting = {"rounds": 50, "separation": 7, "participations": 4}
    factor = optimisation.square_root(20)
    column = factor.column(20)
    ours, _ = optimisation._Setting(50, 7, 4).loss(column, lambda y: lfilter([1.0], column, y))
    assert ours == pytest.approx(2 * np.log(product(factor, **setting)), abs=1e-9)


def test_bands_are_those_of_the_separation_and_at_most_the_rounds():
    setting = {"rounds": 12, "separation": 5, "participations": 2}
    assert BandedMF().factor(**setting).bands == 5
    assert BandedMF(bands=3).factor(**setting).bands == 3
    assert BandedMF(bands=99, optimised=False).factor(**setting).bands == 12
    assert BandedMF(optimised=False).factor(**{**setting, "separation": 99}).bands == 12
    wide = {"rounds": 20_000, "separation": 20_000, "participations": 1}
    assert BandedMF(optimised=False).factor(**wide).bands == 8192


def test_buffers_stay_within_the_largest_sum():
    wide = optimisation._dyadic_buffers(np.array([0.3, 0.02]), np.array([0.99, 0.99999]))
    assert LARGEST_SUM - 5 < wide.total <= LARGEST_SUM
    none = optimisation._dyadic_buffers(np.array([1e-9]), np.array([0.5]))
    assert none == BufferedToeplitzFactor(scales=(1,), decays=(0,))


def test_the_same_options_give_the_same_factor():
    setting = {"rounds": 60, "separation": 12, "participations": 5}
    for options in (BandedMF(), BLT()):
        first = options.factor(**setting)
        optimisation.optimal_banded.cache_clear()
        optimisation.optimal_buffered.cache_clear()
        assert options.factor(**setting) == first
        assert options.factor(**setting) is options.factor(**setting)


@pytest.mark.parametrize("options", [BandedMF(), BLT(), TreeNoise()])
@pytest.mark.parametrize("wrong", ["rounds", "separation", "participations"])
def test_wrong_settings_are_refused(options, wrong):
    setting = {"rounds": 10, "separation": 5, "participations": 2, wrong: 0}
    with pytest.raises(InvalidParameterError, match=f"{wrong} = 0"):
        options.factor(**setting)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (BandedMF, {"bands": 0}),
        (BandedMF, {"bands": 8193}),
        (BandedMF, {"optimised": 1}),
        (BLT, {"buffers": 0}),
        (BLT, {"buffers": 6}),
    ],
)
def test_wrong_options_are_refused(kind, wrong):
    with pytest.raises(InvalidParameterError, match=f"{next(iter(wrong))} = "):
        kind(**wrong)


def test_a_wrong_keyword_is_told_from_the_right_one():
    with pytest.raises(KeywordError, match="the nearest is 'bands'"):
        BandedMF(band=3)


def test_names_tell_the_options_apart():
    assert [kind.name for kind in (BandedMF, BLT, TreeNoise)] == ["banded-mf", "blt", "tree"]


def test_scipy_is_imported_by_a_search_only():
    code = (
        "import sys\n"
        "from flwr_privacy.central_dp.correlated.options import BandedMF\n"
        "from flwr_privacy.central_dp.correlated.sensitivity import joint_sensitivity\n"
        "setting = {'rounds': 9, 'separation': 3, 'participations': 2}\n"
        "joint_sensitivity(BandedMF(optimised=False).factor(**setting), **setting)\n"
        "assert 'scipy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
