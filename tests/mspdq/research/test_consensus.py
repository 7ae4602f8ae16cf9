import numpy as np
import pytest
from mixing_rounds import Transcript, learning_round, terms_of

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.mspdq import (
    Mixing,
    NoiseSplit,
    SubStates,
    UniformSplit,
)
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.mspdq.consensus import (
    recover_w_conserved,
    recover_w_known_c,
    recover_w_near_model,
    recover_w_split_law,
    recover_w_tracked,
    relative_error,
)

CLIENTS, SIZE, KAPPA = 20, 10_000, 0.5
COMMON = 0.05 * np.random.default_rng(21).normal(size=SIZE)  # the model that training began with
MODELS = COMMON + 0.01 * np.random.default_rng(22).normal(size=(CLIENTS, SIZE))


def msp(mixing: Mixing, split=None) -> Transcript:
    random, split = SecureRandom.insecure(21), split or UniformSplit()
    visible = np.stack([split.visible(model, random) for model in MODELS])
    return learning_round(terms_of(mixing), MODELS, random, visible=visible)


def mspdq(start: str, bits: int, mixing: Mixing) -> Transcript:
    rule = "self" if start == "independent" else "linf"
    terms = terms_of(mixing, levels=2**bits, start=start, interval=rule)
    return learning_round(terms, MODELS, SecureRandom.insecure(21), start=COMMON)


def tracked(seen: Transcript, mixing: Mixing, bits: int, i: int) -> np.ndarray:
    return recover_w_tracked(
        seen.heard[:, i],
        seen.averages,
        kappa=KAPPA,
        gains=[mixing.largest_gain(k) for k in range(mixing.rounds)],
        m=mixing.weight,
        steps=seen.widths[:, i] / (2**bits - 1),
    )


@pytest.mark.parametrize("split", [UniformSplit(), NoiseSplit(law="laplace", scale=1.0)])
@pytest.mark.parametrize("m", [1, 4])
def test_F21_a_known_coupling_gives_the_model_away(split, m):
    mixing = Mixing(gamma=0.1, rounds=1, m=m)
    seen = msp(mixing, split)
    for i in range(CLIENTS):
        found = recover_w_known_c(seen.heard[:, i], seen.averages, kappa=KAPPA, c=(1 + m) * 0.1)
        assert np.linalg.norm(seen.heard[0, i] - MODELS[i]) > 0.3 * np.linalg.norm(MODELS[i])
        assert relative_error(found, MODELS[i]) < 1e-12


def test_F21_the_split_law_tells_an_unknown_coupling_and_number_of_hidden_substates():
    draws, random = np.random.default_rng(4), SecureRandom.insecure(4)
    weights = draws.integers(1, 6, size=(CLIENTS, 1))
    gains = draws.uniform(0.05, 0.15, size=(CLIENTS, 1))
    for eps_s in (0.0, 0.3, 0.7):
        split = UniformSplit(eps_s=eps_s)
        visible = np.stack([split.visible(model, random) for model in MODELS])
        states = SubStates.split(MODELS, visible, weight=weights)
        average = visible.mean(axis=0)
        states.step(average, visible, kappa=KAPPA, gain=gains, weight=weights)
        errors = [
            relative_error(
                recover_w_split_law(
                    [visible[i], states.visible[i]], [average], kappa=KAPPA, eps_s=eps_s
                ),
                MODELS[i],
            )
            for i in range(CLIENTS)
        ]
        assert max(errors) < 1e-3


def test_F21_the_conservation_law_recovers_as_mixing_goes_on():
    errors = []
    for rounds in (1, 4, 10, 30, 100):
        # Random couplings, which nobody else knows.
        seen = msp(Mixing(gamma=0.3, coupling="random", rounds=rounds))
        errors.append(
            np.mean(
                [
                    relative_error(
                        recover_w_conserved(seen.heard[:, i], seen.averages, kappa=KAPPA, m=1),
                        MODELS[i],
                    )
                    for i in range(CLIENTS)
                ]
            )
        )
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 1e-5


def test_the_conservation_law_of_mspdq_and_of_several_hidden_substates():
    mixing = Mixing(gamma=0.2, m=2, rounds=80)
    seen = mspdq("independent", 8, mixing)
    for i in range(3):
        found = recover_w_conserved(seen.heard[:, i], seen.averages, kappa=KAPPA, m=2)
        assert relative_error(found, MODELS[i]) < 1e-3
        wrong = recover_w_conserved(seen.heard[:, i], seen.averages, kappa=KAPPA, m=1)
        assert relative_error(wrong, MODELS[i]) > 0.05


def test_a_model_near_by_is_enough_where_noise_was_added():
    seen = msp(Mixing(gamma=0.1, rounds=1), NoiseSplit(law="laplace", scale=1.0))
    found = recover_w_near_model(seen.heard[:, 0], seen.averages, kappa=KAPPA, model=COMMON)
    assert relative_error(seen.heard[0, 0], MODELS[0]) > 10
    assert relative_error(found, MODELS[0]) < 0.01


@pytest.mark.parametrize(
    ("start", "bits", "most"),
    [
        ("global", 8, 0.005),
        ("global", 6, 0.02),
        ("global", 4, 0.07),
        ("reference", 8, 0.02),
        ("reference", 6, 0.06),
        ("reference", 4, 0.25),
        ("independent", 8, 0.02),
        ("independent", 4, 0.3),
    ],
)
def test_the_tracker_reads_updates_through_the_rounding(start, bits, most):
    harmonic = Mixing(gamma=0.1, coupling="harmonic", rounds=10)
    mixing = Mixing(gamma=0.3, rounds=10) if start == "independent" else harmonic
    seen = mspdq(start, bits, mixing)
    errors = [
        relative_error(tracked(seen, mixing, bits, i), MODELS[i], known=COMMON)
        for i in range(CLIENTS)
    ]
    assert max(errors) < most
    # More bits tell more; and rounding does not hide anything entirely.
    assert min(errors) > 1e-4


def test_without_rounding_the_tracker_is_exact():
    for mixing in (Mixing(gamma=0.1, rounds=4), Mixing(gamma=0.2, coupling="sqrt", m=3, rounds=7)):
        seen = msp(mixing)
        assert relative_error(tracked(seen, mixing, 8, 5), MODELS[5]) < 1e-12


def test_sums_alone_tell_no_attack_about_one_client():
    """Under a secure sum the server has the averages in place of what it heard of a client."""
    mixing = Mixing(gamma=0.3, coupling="harmonic", rounds=10)
    seen = mspdq("global", 8, mixing)
    alone = Transcript(
        heard=np.repeat(seen.averages[:, None], CLIENTS, axis=1),
        averages=seen.averages,
        widths=seen.widths,
        saturated=0,
        visible=seen.visible,
        hidden=seen.hidden,
    )
    mean = MODELS.mean(axis=0)
    for i in range(CLIENTS):
        blind = relative_error(mean, MODELS[i], known=COMMON)
        attacks = [
            tracked(alone, mixing, 8, i),
            recover_w_known_c(alone.heard[:, i], alone.averages, kappa=KAPPA, c=0.6),
            recover_w_conserved(alone.heard[:, i], alone.averages, kappa=KAPPA, m=1),
            recover_w_near_model(alone.heard[:, i], alone.averages, kappa=KAPPA, model=COMMON),
        ]
        for found in attacks:
            assert relative_error(found, MODELS[i], known=COMMON) > 0.99 * blind > 0.9
    # While the plain run gives the same client away.
    assert relative_error(tracked(seen, mixing, 8, 0), MODELS[0], known=COMMON) < 0.02


MESSAGES, MEANS = np.ones((3, 2)), np.ones((3, 2))


@pytest.mark.parametrize(
    ("attack", "text"),
    [
        (lambda: recover_w_known_c(MESSAGES[:1], MEANS, kappa=0.5, c=1.0), "two messages or more"),
        (lambda: recover_w_known_c(MESSAGES, MEANS[:, :1], kappa=0.5, c=1.0), "of length 2"),
        (lambda: recover_w_known_c(MESSAGES, MEANS[:1], kappa=0.5, c=1.0), "2 or 3 averages"),
        (lambda: recover_w_known_c(MESSAGES * np.nan, MEANS, kappa=0.5, c=1.0), "NaN or infinity"),
        (lambda: recover_w_known_c(MESSAGES, MEANS, kappa=0.5, c=0.0), r"c = 0\.0"),
        (lambda: recover_w_split_law(MESSAGES, MEANS, kappa=0.5, eps_s=1.0), r"eps_s = 1\.0"),
        (lambda: recover_w_split_law(MESSAGES, MEANS, kappa=0.5, eps_s=0.3), "no weight that"),
        (lambda: recover_w_conserved(MESSAGES, MEANS[:2], kappa=0.5, m=1), r"averages = \(2, 2\)"),
        (
            lambda: recover_w_near_model(MESSAGES, MEANS, kappa=0.5, model=np.ones(3)),
            "a finite vector of length 2",
        ),
        (
            lambda: recover_w_near_model(MESSAGES, MEANS, kappa=0.5, model=np.ones(2)),
            "messages that moved",
        ),
        (
            lambda: recover_w_tracked(MESSAGES, MEANS, kappa=0.5, gains=[0.1], m=1, steps=[0, 0]),
            "gains = 1: expected 2 numbers",
        ),
        (
            lambda: recover_w_tracked(MESSAGES, MEANS, kappa=0.5, gains=[0, 0], m=1, steps=[0, 0]),
            "couplings that move something",
        ),
    ],
)
def test_what_no_transcript_can_be(attack, text):
    with pytest.raises(InvalidParameterError, match=text):
        attack()
