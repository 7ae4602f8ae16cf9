import json
import math
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import DataError
from flwr_privacy.privacy.card import (
    Answers,
    CardRelease,
    Described,
    PrivacyCard,
    settings_of,
)
from flwr_privacy.privacy.guarantee import Guarantee

DELTA = 1e-5
PROMISE = Guarantee(
    scheme="udp",
    protects="all data of a client",
    adversary="the server",
    neighbours="anything differs",
    epsilon=4.0,
    delta=DELTA,
)
ONE, OTHER = (
    Charge(neighbours="replace_one", noise_multiplier=2.0),
    Charge(neighbours="replace_one", noise_multiplier=5.0),
)


def gaussian_epsilon(*noise_multipliers: float, delta: float = DELTA) -> float:
    """Return the epsilon of Gaussian releases, from the closed form of delta."""
    mu = math.sqrt(sum(z**-2 for z in noise_multipliers))

    def excess(epsilon: float) -> float:
        a, b = mu / 2, epsilon / mu
        return norm.cdf(a - b) - math.exp(epsilon + norm.logcdf(-a - b)) - delta

    return brentq(excess, 0.0, 100.0, xtol=1e-13)


def release(
    server_round: int, clients: str, charge: Charge = ONE, *, unanswered: str | None = ""
) -> CardRelease:
    return CardRelease(
        phase="train",
        server_round=server_round,
        request=0,
        charge=charge,
        clients=tuple(clients),
        unanswered=None if unanswered is None else tuple(unanswered),
    )


def card(*releases: CardRelease) -> PrivacyCard:
    return PrivacyCard(experiment_id="e", guarantee=PROMISE, releases=list(releases))


def full() -> PrivacyCard:
    """Return a card of three clients with different histories; "b" spent most."""
    made = card(
        release(1, "abc", unanswered="ac"), release(2, "b"), release(3, "bc", OTHER, unanswered="c")
    )
    made.state()
    return made


# -- What the charges come to -----------------------------------------------------------------


def test_epsilon_is_that_of_the_client_that_spent_most_whatever_the_others_did():
    made = full()
    assert made.epsilon("gdp") == pytest.approx(gaussian_epsilon(2, 2, 5), rel=1e-9)
    many_small = card(release(1, "a"), *(release(r, "b", OTHER) for r in range(2, 7)))
    assert many_small.epsilon("gdp") == pytest.approx(gaussian_epsilon(2), rel=1e-9)
    enough_small = card(release(1, "a"), *(release(r, "b", OTHER) for r in range(2, 10)))
    assert enough_small.epsilon("gdp") == pytest.approx(gaussian_epsilon(*[5] * 8), rel=1e-9)


def test_the_order_of_the_charges_and_how_they_are_bundled_make_no_difference():
    one = card(release(1, "a"), release(2, "a", OTHER), release(3, "a"))
    other = card(
        release(1, "a", OTHER),
        release(2, "a", Charge(neighbours="replace_one", noise_multiplier=2.0, count=2)),
    )
    for accountant in ("gdp", "rdp", "pld"):
        assert one.epsilon(accountant) == pytest.approx(other.epsilon(accountant), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_epsilon_is_that_of_each_client_s_own_charges(seed):
    random = np.random.default_rng(seed)
    charges = [Charge(neighbours="replace_one", noise_multiplier=z) for z in (4.0, 5.0, 6.0)]
    made = card(
        *(
            release(r, "".join(random.choice(list("abcdefgh"), 4, replace=False)), charge)
            for r, charge in enumerate(random.choice(charges, 30))
        )
    )
    alone = [
        gaussian_epsilon(*(charge.noise_multiplier for charge in own))
        for own in made.charges().values()
    ]
    assert made.epsilon("gdp") == pytest.approx(max(alone), rel=1e-9)


def test_charges_are_listed_by_client_in_their_order():
    assert full().charges() == {"a": [ONE], "b": [ONE, ONE, OTHER], "c": [ONE, OTHER]}


def test_the_gap_of_the_grid_counts():
    gap = 0.25
    made = card(release(1, "a", Charge(neighbours="replace_one", noise_multiplier=2.0, gap=gap)))
    expected = gap + gaussian_epsilon(2, delta=DELTA * math.exp(-gap))
    assert made.epsilon("gdp") == pytest.approx(expected, rel=1e-9)


def test_all_accountants_that_can_tell_are_stated():
    made = full()
    assert set(made.stated) == {"gdp", "rdp", "pld"}
    assert made.stated["gdp"] == pytest.approx(gaussian_epsilon(2, 2, 5), rel=1e-9)
    assert made.stated["gdp"] <= made.stated["pld"] * (1 + 1e-9) < made.stated["rdp"]
    assert made.stated["pld"] == pytest.approx(made.stated["gdp"], rel=1e-3)
    assert made.verify() == {name: (total, total) for name, total in made.stated.items()}


def test_an_accountant_that_cannot_tell_states_nothing():
    made = card(
        release(1, "ab"),
        release(2, "b", Charge(neighbours="replace_one", noise_multiplier=2.0, sampling=0.1)),
    )
    made.state()
    assert set(made.stated) == {"rdp", "pld"}
    assert made.epsilon("gdp") is None
    assert set(made.verify()) == {"rdp", "pld"}


def test_a_scheme_without_a_budget_has_a_card_without_numbers():
    promise = Guarantee(scheme="fedavg", protects="nothing", adversary="nobody")
    made = PrivacyCard(experiment_id="e", guarantee=promise)
    assert made.verify() == {}
    again = PrivacyCard.from_json(made.to_json())
    assert again == made
    assert again.verify() == {}
    assert "fedavg protects nothing." in made.to_html()


def test_before_the_first_release_nothing_is_spent():
    made = card()
    made.state()
    assert made.verify() == {"gdp": (0.0, 0.0), "rdp": (0.0, 0.0), "pld": (0.0, 0.0)}


# -- What became of them -------------------------------------------------------------------------


def test_what_was_charged_and_never_answered_is_counted():
    assert full().answers() == Answers(charged=6, unanswered=3, untold=0)
    assert str(full().answers()) == "6 charged, 3 answered, 3 never answered"
    assert "<td>6 charged, 3 answered, 3 never answered</td>" in full().to_html()
    assert str(card().answers()) == "0 charged, 0 answered, 0 never answered"


def test_where_participants_are_secret_nothing_is_said_of_their_answers():
    made = card(release(1, "abc", unanswered=None), release(2, "abc", unanswered=None))
    assert made.answers() == Answers(charged=6, unanswered=0, untold=6)
    assert str(made.answers()) == "6 charged; who was asked, and who answered, is a secret"
    assert "never answered" not in made.to_html()
    made.releases[1] = release(2, "abc", unanswered="b")
    assert str(made.answers()) == "6 charged, 2 answered, 1 never answered, 3 secret"
    made.state()
    assert PrivacyCard.from_json(made.to_json()).verify()


@pytest.mark.parametrize(
    ("clients", "unanswered"),
    [("abc", "d"), ("abc", "aa"), ("abc", "abcd")],
)
def test_an_answer_that_is_missing_of_somebody_who_was_not_charged_is_found(clients, unanswered):
    made = card(release(1, clients, unanswered=unanswered))
    made.state()
    with pytest.raises(DataError, match="round 1 a client is without an answer that was not"):
        made.verify()


@pytest.mark.parametrize(
    "releases",
    [
        (release(1, "aab"),),
        (release(1, "ab"), release(1, "bc")),
        (release(1, "ab"), release(1, "bc", OTHER, unanswered="c")),
    ],
)
def test_a_client_that_is_charged_twice_for_a_question_is_found(releases):
    made = card(*releases)
    made.state()
    with pytest.raises(DataError, match="round 1 a client is charged twice for a question"):
        made.verify()


@pytest.mark.parametrize(
    "path", ["answers/charged", "answers/unanswered", "answers/untold", "releases/0/unanswered"]
)
def test_a_count_of_answers_that_was_changed_is_found(path):
    value = ["a"] if path.startswith("releases") else 2
    with pytest.raises(DataError, match=r"the card states .* charged"):
        read(changed(path, value)).verify()


# -- As a file ----------------------------------------------------------------------------------


def test_a_card_survives_a_file_and_still_verifies():
    made = full()
    for text in (made.to_json(), made.to_json().encode()):
        again = PrivacyCard.from_json(text)
        assert again == made
        assert again.verify() == made.verify()
    assert made.to_json() == PrivacyCard.from_json(made.to_json()).to_json()


GOOD = full().to_json()


def document(**changes: Any) -> dict[str, Any]:
    return {**json.loads(GOOD), **changes}


def read(entries: Any) -> PrivacyCard:
    return PrivacyCard.from_json(json.dumps(entries))


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the entries of a good card with one changed; the path is "releases/0/charge"."""
    entries = document()
    *parents, last = path.split("/")
    place: Any = entries
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[int(last) if isinstance(place, list) else last] = value
    return entries


def without(path: str) -> dict[str, Any]:
    entries = document()
    *parents, last = path.split("/")
    place: Any = entries
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    del place[int(last) if isinstance(place, list) else last]
    return entries


def test_the_rows_below_start_from_a_good_card():
    read(document()).verify()


# -- What `verify` finds ------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["gdp", "rdp", "pld"])
@pytest.mark.parametrize("factor", [0.0, 0.5, 1 - 1e-5, 1 + 1e-5, 2.0])
def test_an_epsilon_that_was_changed_is_found(accountant, factor):
    stated = full().stated[accountant]
    with pytest.raises(DataError, match=rf"states epsilon .* \({accountant}\), its charges give"):
        read(changed(f"epsilon/{accountant}", stated * factor)).verify()


def test_the_last_digits_of_an_epsilon_may_differ():
    stated = full().stated["gdp"]
    numbers = read(changed("epsilon/gdp", stated * (1 + 1e-8))).verify()
    assert numbers["gdp"] == (stated * (1 + 1e-8), stated)


def test_a_release_that_was_removed_or_added_is_found():
    for place in (1, 2):
        with pytest.raises(DataError, match="its charges give"):
            read(without(f"releases/{place}")).verify()
    entries = document()
    for extra in entries["releases"]:
        with pytest.raises(DataError, match="its charges give"):
            read({**entries, "releases": [*entries["releases"], extra]}).verify()
    with pytest.raises(DataError, match=r"its charges give 0\.0"):
        read({**entries, "releases": []}).verify()


def test_a_client_that_was_removed_added_or_renamed_is_found():
    for clients in (["c"], ["b", "b", "c"], ["x", "c"], []):
        with pytest.raises(DataError, match="its charges give"):
            read(changed("releases/2/clients", clients)).verify()


@pytest.mark.parametrize(
    ("entry", "value"),
    [("noise_multiplier", 5.001), ("noise_multiplier", 1e9), ("gap", 1e-4), ("count", 2)],
)
def test_a_charge_that_was_changed_is_found(entry, value):
    with pytest.raises(DataError, match="its charges give"):
        read(changed(f"releases/2/charge/{entry}", value)).verify()


def test_a_sample_or_another_kind_of_noise_that_was_claimed_is_found():
    with pytest.raises(DataError, match=r"\(gdp\), its charges give None"):
        read(changed("releases/2/charge/sampling", 0.5)).verify()
    with pytest.raises(DataError, match=r"\(gdp\), its charges give None"):
        read(changed("releases/2/charge/mechanism", "laplace")).verify()


def test_another_delta_is_found():
    with pytest.raises(DataError, match="its charges give"):
        read(changed("guarantee/delta", 1e-4)).verify()
    with pytest.raises(DataError, match="the delta that epsilon is for"):
        read(without("guarantee/delta"))


def test_a_guarantee_that_is_exceeded_is_found():
    spent = full().stated["gdp"]
    for bound in (spent * (1 - 1e-5), 1.0, 0.0):
        with pytest.raises(DataError, match=rf"give epsilon {spent}, the guarantee says {bound}"):
            read(changed("guarantee/epsilon", bound)).verify()
    read(changed("guarantee/epsilon", spent)).verify()


def test_one_sound_accountant_under_the_bound_is_enough():
    """The loosest of them may be above it: each is an upper bound."""
    spent = full().stated
    bound = (spent["pld"] + spent["rdp"]) / 2
    assert set(read(changed("guarantee/epsilon", bound)).verify()) == {"gdp", "rdp", "pld"}


def test_releases_without_a_statement_do_not_pass():
    with pytest.raises(DataError, match="has releases and states no epsilon"):
        read(document(epsilon={})).verify()


@pytest.mark.parametrize("path", ["epsilon/gdp", "guarantee/epsilon"])
def test_a_number_that_is_none_is_found(path):
    with pytest.raises(DataError):
        read(changed(path, math.nan)).verify()


def test_a_statement_about_charges_without_a_bound_is_found():
    entries = changed("releases/2/charge/noise_multiplier", 1e-300)
    del entries["guarantee"]["epsilon"]
    with pytest.raises(DataError):
        read(entries).verify()


def test_what_the_guarantee_says_was_spent_is_recomputed():
    entries = changed("guarantee/spent", 0.001)
    entries["guarantee"]["accountant"] = "gdp"
    with pytest.raises(DataError):
        read(entries).verify()


# -- What is no card ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "{}",
        "7",
        '"card"',
        GOOD[:-10],
        GOOD + "x",
        b"\xff\xfe\x00",
        "\ufeff" + GOOD,
    ],
)
def test_a_text_that_is_no_card_is_refused(text):
    with pytest.raises(DataError):
        PrivacyCard.from_json(text)


@pytest.mark.parametrize(
    "path",
    [
        "version",
        "experiment_id",
        "described",
        "described/name",
        "described/versions",
        "guarantee",
        "guarantee/scheme",
        "guarantee/protects",
        "epsilon",
        "releases",
        "releases/0/phase",
        "releases/0/round",
        "releases/0/request",
        "releases/0/charge",
        "releases/0/charge/gap",
        "releases/0/charge/noise_multiplier",
        "releases/0/clients",
        "releases/0/unanswered",
        "answers",
        "answers/untold",
    ],
)
def test_a_card_with_something_missing_is_refused(path):
    with pytest.raises(DataError, match="no privacy card"):
        read(without(path))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 1),
        ("version", 3),
        ("described", None),
        ("described/more", ""),
        ("described/arrays", "4"),
        ("described/values", True),
        ("described/settings", ["epsilon"]),
        ("described/settings", {"epsilon": 8}),
        ("answers", None),
        ("answers/charged", 6.0),
        ("answers/more", 1),
        ("releases/0/unanswered", 3),
        ("releases/0/unanswered", [1]),
        ("version", "1"),
        ("version", None),
        ("guarantee", None),
        ("guarantee", [1]),
        ("guarantee/unknown", 1),
        ("epsilon", [1.0]),
        ("epsilon", None),
        ("epsilon/gdp", None),
        ("epsilon/gdp", "much"),
        ("epsilon/gdp", [1.0]),
        ("releases", None),
        ("releases", {"0": 1}),
        ("releases/0", None),
        ("releases/0", "release"),
        ("releases/0/round", None),
        ("releases/0/round", "first"),
        ("releases/0/clients", None),
        ("releases/0/clients", 3),
        ("releases/0/charge", None),
        ("releases/0/charge", [1]),
        ("releases/0/charge/unknown", 1),
        ("releases/0/charge/noise_multiplier", 0.0),
        ("releases/0/charge/noise_multiplier", -2.0),
        ("releases/0/charge/noise_multiplier", "2"),
        ("releases/0/charge/noise_multiplier", math.nan),
        ("releases/0/charge/noise_multiplier", math.inf),
        ("releases/0/charge/mechanism", "cauchy"),
        ("releases/0/charge/sampling", 0.0),
        ("releases/0/charge/sampling", 1.5),
        ("releases/0/charge/gap", -0.1),
        ("releases/0/charge/gap", math.nan),
        ("releases/0/charge/count", 0),
        ("releases/0/charge/count", 1.0),
        ("releases/0/charge/count", True),
    ],
)
def test_a_card_with_a_value_that_is_not_allowed_is_refused(path, value):
    with pytest.raises(DataError):
        read(changed(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("releases/0/round", math.inf),
        ("epsilon/gdp", 10**400),
        ("releases/0/charge/count", 10**400),
        ("epsilon", {"abacus": 1.0}),
        ("guarantee/epsilon", "8"),
        ("guarantee/delta", "1e-5"),
        ("guarantee/delta", 2.0),
        ("guarantee/scheme", 5),
        ("guarantee/not_protected", [1, 2]),
    ],
)
def test_a_card_with_an_odd_value_is_refused_as_a_card_by_the_time_it_is_verified(path, value):
    def use() -> None:
        made = read(changed(path, value))
        made.verify()
        made.guarantee.text()
        made.to_html()

    with pytest.raises(DataError):
        use()


def test_a_card_that_is_nested_too_deeply_is_refused():
    with pytest.raises(DataError):
        PrivacyCard.from_json("[" * 100_000)


def test_clients_are_a_list():
    with pytest.raises(DataError):
        read(changed("releases/0/clients", "abc"))


# -- As a page ----------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects text and what a page refers to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [str(v) for k, v in attrs if k in ("src", "href", "action")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_says_what_the_card_says_and_refers_to_nothing():
    made = full()
    page = Page(made.to_html())
    assert page.references == []
    text = " ".join(page.texts)
    guarantee = made.guarantee
    limits = (*guarantee.not_protected, *guarantee.assumptions, *guarantee.evidence)
    for part in (guarantee.sentence(), f"data sets where {guarantee.neighbours}", *limits):
        assert part in text
    assert made.to_json() in page.texts
    assert f"{made.stated['gdp']:.6g}" in text
    assert (
        "1 clients: 1 each; 1 clients: 2 each; 1 clients: 3 each" in text
    )  # one client with one release, one with two, ...


@pytest.mark.parametrize(
    ("guarantee", "verdict"),
    [
        (PROMISE, "VALID nothing in this run voids the guarantee"),
        (replace(PROMISE, void="a seed & more"), "VOID a seed & more"),
        (
            Guarantee(scheme="fedavg", protects="nothing", adversary="nobody"),
            "NO PROMISE this run protects nobody's data",
        ),
    ],
)
def test_its_first_line_says_whether_it_is_valid(guarantee, verdict):
    made = PrivacyCard(experiment_id="e", guarantee=guarantee)
    body = Page(made.to_html().partition("<body>")[2])
    assert "".join(body.texts).startswith(f"{verdict}\nPrivacy card: ")


def test_it_says_what_was_trained_with_which_settings():
    described = Described.now(
        name="ward", model={"w": np.zeros((3, 4))}, settings={"privacy": "UserLevel(epsilon=4.0)"}
    )
    made = PrivacyCard(experiment_id="e", guarantee=PROMISE, described=described)
    again = PrivacyCard.from_json(made.to_json())
    assert again.described == described
    text = " ".join(Page(again.to_html()).texts)
    for part in ("Privacy card: ward", "1 arrays, 12 values", "UserLevel(epsilon=4.0)", "flwr"):
        assert part in text


def test_settings_have_no_seeds_of_noise_places_or_data():
    @dataclass
    class Options:
        insecure_seed: int | None = None
        run_dir: str | None = None
        labels: object = None
        budgets: object = None
        same: float = 2.0

    many = dict.fromkeys(map(str, range(21)), 1.0)
    options = Options(insecure_seed=5, run_dir="/secret", labels=np.arange(3), budgets=many)
    assert settings_of(options) == {"labels": "ndarray", "budgets": "21 entries"}


def test_names_of_hostile_clients_stay_text():
    hostile = "</pre><script>alert(1)</script>"
    made = card(
        CardRelease(
            phase=hostile,
            server_round=1,
            request=0,
            charge=ONE,
            clients=(hostile, "&amp;"),
            unanswered=(hostile,),
        )
    )
    page = Page(made.to_html())
    assert "script" not in page.tags
    assert page.tags.count("pre") == 1
    assert PrivacyCard.from_json(made.to_json()).releases[0].clients == (hostile, "&amp;")


# -- A long run -------------------------------------------------------------------------------


def test_a_card_that_is_too_large_for_a_page_is_left_in_its_file():
    many = tuple(f"client-{number}" for number in range(100_000))
    large = card(replace(release(1, ""), clients=many), release(2, "a"))
    page = large.to_html()
    assert len(large.to_json()) > 10 * len(page)
    assert "100001" in page
    assert "in the JSON file of this card (1.6 MB)" in page
    assert "client-99999" not in page


def test_a_written_release_follows_its_changes():
    made = card(release(1, "ab", unanswered="b"))
    before = json.loads(made.to_json())["releases"]
    made.releases[0] = replace(made.releases[0], unanswered=())
    after = json.loads(made.to_json())["releases"]
    assert [one["unanswered"] for one in (*before, *after)] == [["b"], []]
