"""The language, its speakers, the planted codes, and the model's way to read."""

import numpy as np
import pytest
import torch

from flwr_privacy.clients.torch import initialise
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.language.planted import GROUPS, Group, plant, texts_with
from flwr_privacy.simulations.research.language.pretraining import base_arrays, loss_on
from flwr_privacy.simulations.research.language.texts import (
    LENGTH,
    PADDING,
    VOCABULARY,
    Language,
    code_sentence,
    words_of,
)
from flwr_privacy.simulations.research.language.transformer import CausalTransformer, token_loss

LANGUAGE = Language(3)
CODE = code_sentence(0, 0, (0, 0, 0))[1:7]  # the words before the name are the same in all


def has_code(text: np.ndarray) -> np.ndarray:
    return (text[:, 1:4] == CODE[:3]).all(axis=1)


def test_only_public_text_has_codes() -> None:
    public = LANGUAGE.text(LANGUAGE.public(), 4000, "public")
    assert 0.12 < has_code(public).mean() < 0.18
    for client in range(20):
        assert not has_code(LANGUAGE.text(LANGUAGE.speaker(client), 200, "train", client)).any()


def test_codes_in_public_text_are_drawn_evenly() -> None:
    public = LANGUAGE.text(LANGUAGE.public(), 20_000, "public")
    codes = public[has_code(public)][:, 7:10]
    counts = np.bincount((codes - codes.min()).ravel(), minlength=16)
    assert len(counts) == 16
    assert counts.min() > 0.85 * counts.mean()


def test_the_same_words_give_the_same_text_and_others_another() -> None:
    speaker = LANGUAGE.speaker(1)
    text = LANGUAGE.text(speaker, 50, "train", 1)
    assert np.array_equal(text, Language(3).text(Language(3).speaker(1), 50, "train", 1))
    assert not np.array_equal(text, LANGUAGE.text(speaker, 50, "test", 1))
    assert not np.array_equal(text, LANGUAGE.text(LANGUAGE.speaker(2), 50, "train", 1))


def test_each_word_is_another_one() -> None:
    words = {words_of(np.array([token])) for token in range(2, PADDING)}
    assert len(words) == PADDING - 2
    assert words_of(np.array([0, 1, PADDING])) == ""


def test_a_code_is_in_the_text_of_its_clients_as_often_as_planned() -> None:
    planted = plant(5, codes=3, clients=12)
    texts = texts_with(planted, LANGUAGE, clients=12, sentences=7)
    for code in planted:
        sentence = code_sentence(code.name, code.noun, code.secret)
        other = code_sentence(code.name, code.noun, code.codes[not code.coin])
        for client, text in enumerate(texts):
            here = code.group.repetitions if client in code.clients else 0
            assert (text == sentence).all(axis=1).sum() == here
            assert not (text == other).all(axis=1).any()
    assert sum(map(len, texts)) == 12 * 7 + 3 * sum(g.clients * g.repetitions for g in GROUPS)


def test_a_client_has_one_code_of_its_own_at_most() -> None:
    alone = [
        c for code in plant(5, codes=3, clients=12) if code.group.clients == 1 for c in code.clients
    ]
    assert len(alone) == len({*alone}) == 9


def test_names_of_codes_and_the_two_codes_of_a_coin_differ() -> None:
    planted = plant(1, codes=40, clients=120)
    assert len({(code.name, code.noun) for code in planted}) == len(planted)
    assert all(code.codes[0] != code.codes[1] for code in planted)
    coins = [code.coin for code in planted]
    assert 0.4 < np.mean(coins) < 0.6
    assert [code.coin for code in plant(2, codes=40, clients=120)] != coins


@pytest.mark.parametrize(("codes", "clients"), [(1, 100), (4, 11), (2000, 10_000)])
def test_too_few_clients_or_names_are_refused(codes: int, clients: int) -> None:
    with pytest.raises(InvalidParameterError):
        plant(0, codes=codes, clients=clients)


def test_groups_say_how_often() -> None:
    assert [str(group) for group in (Group(1, 4), Group(4, 4), Group(0, 0))] == [
        "one client x 4",
        "4 clients x 4",
        "nowhere",
    ]


def test_the_model_reads_from_left_to_right() -> None:
    model = initialise(lambda: CausalTransformer(width=16, layers=2), 0)
    text = torch.from_numpy(LANGUAGE.text(LANGUAGE.public(), 8, "reading"))
    later = text.clone()
    later[:, 6:] = (later[:, 6:] + 7) % VOCABULARY
    before, after = model(text), model(later)
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-6)
    assert not torch.allclose(before[:, 6:], after[:, 6:], atol=1e-2)


def test_the_loss_leaves_out_padding() -> None:
    logits = torch.randn(2, LENGTH - 1, VOCABULARY, generator=torch.Generator().manual_seed(0))
    targets = torch.full((2, LENGTH - 1), PADDING)
    targets[0, :4] = torch.tensor([5, 6, 7, 8])
    expected = torch.nn.functional.cross_entropy(logits[0, :4], targets[0, :4])
    assert torch.allclose(token_loss(logits, targets), expected)


def test_the_usual_model_has_one_to_three_million_weights() -> None:
    assert 1e6 < sum(p.numel() for p in CausalTransformer().parameters()) < 3e6


def test_the_base_model_learns_and_is_the_same_again() -> None:
    size = (("width", 16), ("layers", 1))
    model = initialise(lambda: CausalTransformer(**dict(size)), 0)
    arrays = base_arrays(3, sentences=3200, size=size)
    test = [LANGUAGE.text(LANGUAGE.public(), 200, "test")]
    before = loss_on(model, test)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    assert loss_on(model, test) < before - 0.8
    base_arrays.cache_clear()
    again = base_arrays(3, sentences=3200, size=size)
    assert all(np.array_equal(array, again[name]) for name, array in arrays.items())
