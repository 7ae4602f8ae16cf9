import dataclasses
import math
import re

import pytest

from flwr_privacy.errors import DeclinedError, InvalidParameterError
from flwr_privacy.privacy.policy import Policy

ASKED = {"scheme": "udp", "unit": "user", "noise_multiplier": 1.0, "sigma": 0.01}

FULL = """
max_epsilon = 10
delta = 1e-6
min_noise_multiplier = 1.5
min_sigma = 0.001
schemes = ["udp", "m2fdp"]
units = ["user"]
neighbours = ["add_remove"]
trusted_parents = ["ward-7"]
noise_members = ["m0", "m1"]
min_summed = 3
min_children = 4
allowed_messages = ["query.report"]
max_cohort = 50
max_releases = 1000
max_releases_per_day = 20
max_disk = 1_000_000
"""


@pytest.fixture
def read(tmp_path):
    def from_text(text: str) -> Policy:
        path = tmp_path / "policy.toml"
        path.write_text(text, encoding="utf-8")
        return Policy.read(path)

    return from_text


def test_every_key_of_a_file_is_read(read):
    assert dataclasses.asdict(read(FULL)) == {
        "max_epsilon": 10,
        "delta": 1e-6,
        "min_noise_multiplier": 1.5,
        "min_sigma": 0.001,
        "schemes": ("udp", "m2fdp"),
        "units": ("user",),
        "neighbours": ("add_remove",),
        "trusted_parents": ("ward-7",),
        "noise_members": ("m0", "m1"),
        "min_summed": 3,
        "min_children": 4,
        "allow_unprotected": None,
        "allowed_messages": ("query.report",),
        "max_cohort": 50,
        "max_releases": 1000,
        "max_releases_per_day": 20,
        "max_disk": 1_000_000,
    }


@pytest.mark.parametrize(
    "limit",
    [
        {"max_epsilon": 1},
        {"units": ["user"]},
        {"min_noise_multiplier": 1},
        {"min_sigma": 1},
        {"neighbours": ["replace_one"]},
    ],
)
def test_what_refuses_every_answer_without_noise_stands_alone(limit):
    assert Policy(allow_unprotected=["central-dp"]).allow_unprotected == ("central-dp",)
    with pytest.raises(InvalidParameterError, match=f"allow_unprotected.* {next(iter(limit))}"):
        Policy(allow_unprotected=["central-dp"], **limit)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_cohort", 1), ("max_releases", -1), ("max_releases_per_day", 0.5), ("max_disk", -1)],
)
def test_a_limit_that_is_no_count_is_refused(name, value):
    with pytest.raises(InvalidParameterError, match=name):
        Policy(**{name: value})


def test_a_node_that_wants_a_secure_sum_answers_within_a_large_one_only():
    policy = Policy(min_summed=3)
    policy.check_sum(3)
    with pytest.raises(DeclinedError, match=r"of at least 2 clients .* min_summed = 3"):
        policy.check_sum(2)
    with pytest.raises(DeclinedError, match=r"outside of a secure sum .* min_summed = 3"):
        policy.check_sum(None)
    Policy().check_sum(None)
    with pytest.raises(InvalidParameterError, match="min_summed = 1"):
        Policy(min_summed=1)


def test_an_empty_file_is_the_default_which_allows_everything(read):
    policy = read("")
    assert policy == Policy()
    assert policy.delta == 1e-5
    policy.check(scheme="any", unit="record", noise_multiplier=0, sigma=0.0)


def test_nothing_changes_a_policy_later():
    schemes = ["udp"]
    policy = Policy(schemes=schemes)
    schemes.append("other")
    with pytest.raises(DeclinedError):
        policy.check(**{**ASKED, "scheme": "other"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.max_epsilon = 1.0


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("max_epsilon = -1", "max_epsilon = -1: expected a finite number of at least 0"),
        ("max_epsilon = inf", "max_epsilon = inf: expected a finite number"),
        ("max_epsilon = nan", "max_epsilon = nan: expected a finite number"),
        ('max_epsilon = "10"', "max_epsilon = '10': expected a finite number"),
        ("max_epsilon = true", "max_epsilon = True: expected a finite number"),
        ("delta = 0", "delta = 0: expected a finite number from"),
        ("delta = 1.0", "delta = 1.0: expected a finite number from"),
        ("min_noise_multiplier = -0.1", "min_noise_multiplier = -0.1: expected"),
        ("min_sigma = [1]", "min_sigma = [1]: expected a finite number"),
        ('schemes = "udp"', "schemes = 'udp': expected a list of names"),
        ('schemes = ["udp", 1]', "schemes = ['udp', 1]: expected a list of names"),
        ('schemes = [""]', "schemes = ['']: expected a list of names"),
        ('units = ["users"]', "units = 'users': expected one of 'record', 'user' (nearest: 'user'"),
        (
            'neighbours = ["all"]',
            "neighbours = 'all': expected one of 'add_remove', 'replace_one',",
        ),
        ("trusted_parents = 7", "trusted_parents = 7: expected a list of names"),
        ("max_epsilom = 1", "key = 'max_epsilom': expected one of"),
        ("max_epsilom = 1", "(nearest: 'max_epsilon'"),
        ("[policy]\nmax_epsilon = 1", "key = 'policy': expected one of"),
        ("max_epsilon = ", "expected a TOML file (Invalid value"),
        ("delta = 1e-5\ndelta = 1e-6", "expected a TOML file (Cannot overwrite a value"),
    ],
)
def test_a_wrong_file_is_refused_by_name(read, line, text):
    with pytest.raises(InvalidParameterError, match=re.escape(text)) as refusal:
        read(line)
    assert "policy.toml" in str(refusal.value)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    with pytest.raises(InvalidParameterError, match=r"policy.*absent\.toml.*No such file"):
        Policy.read(tmp_path / "absent.toml")
    with pytest.raises(InvalidParameterError, match=r"can be read \(Is a directory\)"):
        Policy.read(str(tmp_path))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"delta = 1e-5 # \xff")
    with pytest.raises(InvalidParameterError, match=r"binary\.toml.*expected a TOML file"):
        Policy.read(binary)


@pytest.mark.parametrize(
    ("policy", "changes", "text"),
    [
        (
            {"schemes": ["udp", "m2fdp"]},
            {"scheme": "acfl"},
            "scheme 'acfl' asks for a release: the node's policy has schemes = ['udp', 'm2fdp']",
        ),
        (
            {"schemes": []},
            {},
            "scheme 'udp' asks for a release: the node's policy has schemes = []",
        ),
        (
            {"units": ["user"]},
            {"unit": "record"},
            "scheme 'udp' protects the unit 'record': the node's policy has units = ['user']",
        ),
        (
            {"min_noise_multiplier": 1.0},
            {"noise_multiplier": 0.5},
            "scheme 'udp' asks for noise multiplier 0.5: "
            "the node's policy has min_noise_multiplier = 1",
        ),
        (
            {"min_noise_multiplier": 1.0},
            {"noise_multiplier": math.nextafter(1.0, 0)},
            "the node's policy has min_noise_multiplier = 1",
        ),
        (
            {"min_sigma": 0.01},
            {"sigma": 0},
            "scheme 'udp' asks for sigma 0: the node's policy has min_sigma = 0.01",
        ),
    ],
)
def test_a_release_that_the_policy_does_not_allow_is_declined(policy, changes, text):
    Policy().check(**{**ASKED, **changes})
    with pytest.raises(DeclinedError, match=re.escape(text)):
        Policy(**policy).check(**{**ASKED, **changes})


def test_what_is_just_enough_is_allowed():
    policy = Policy(
        max_epsilon=10,
        min_noise_multiplier=1.0,
        min_sigma=0.01,
        schemes=["udp"],
        units=["user", "record"],
    )
    policy.check(**ASKED)


def test_a_release_whose_sigma_is_not_known_yet_meets_the_rest_of_the_policy():
    policy = Policy(min_noise_multiplier=1.0, min_sigma=0.01)
    early = {key: value for key, value in ASKED.items() if key != "sigma"}
    policy.check(**early)
    with pytest.raises(DeclinedError, match="min_noise_multiplier"):
        policy.check(**{**early, "noise_multiplier": 0.9})
    with pytest.raises(DeclinedError, match="min_sigma"):
        policy.check(**early, sigma=0.009)


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"scheme": None}, "scheme"),
        ({"unit": "everyone"}, "unit"),
        ({"unit": ["user"]}, "unit"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": "9"}, "noise_multiplier"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"sigma": math.inf}, "sigma"),
        ({"sigma": "0.1"}, "sigma"),
    ],
)
def test_a_malformed_question_is_refused_under_every_policy(changes, parameter):
    for policy in (Policy(), Policy(min_noise_multiplier=1.0, min_sigma=0.01)):
        with pytest.raises(InvalidParameterError) as refusal:
            policy.check(**{**ASKED, **changes})
        assert refusal.value.parameter == parameter


def test_a_long_name_of_a_scheme_is_cut_in_the_error():
    with pytest.raises(DeclinedError) as refusal:
        Policy(schemes=["udp"]).check(**{**ASKED, "scheme": "udp" * 10**6})
    assert len(str(refusal.value)) < 200
