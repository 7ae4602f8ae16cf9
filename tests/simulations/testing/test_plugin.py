"""The pytest plugin, as somebody has it who wrote a strategy and a client: in their own pytest."""

import re
from pathlib import Path

import pytest

from flwr_privacy.simulations.testing import plugin

pytest_plugins = ("pytester",)

PAGE = Path(__file__).parents[3] / "docs" / "testing.md"

OWN = """
from dataclasses import replace

from flwr_privacy.clients import UDPClient
from flwr_privacy.pipeline.mechanism import Facts
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import Update
from flwr_privacy.simulations.testing import WrapsConformance
from flwr_privacy.strategies import UDP
from flwr_privacy.udp.terms import UDPTerms
from flwr_privacy.wire import fields as records
"""

PRINTED = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)

BARE = """
import sys

LARGE = {"flwr_datasets", "galois", "jinja2", "matplotlib", "pandas", "ray", "sklearn", "torch"}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LARGE:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
"""
"""Makes an environment of one with the extra `simulation`, without it."""

WRONG = (
    OWN
    + """
class Changed(UDPClient):
    terms = UDPTerms

    def release(self, phase, arrays, fields, train):
        release = super().release(phase, arrays, fields, train)
        return replace(release, mechanism=self.terms(**vars(release.mechanism)))

class Unclipped(Changed):
    class terms(UDPTerms):
        def measure(self, start, outcome):
            update = Update.between(start, outcome, self._names(start), clipping_norm=5.0)
            return super().measure(start, outcome)._replace(update=update)

class Quiet(Changed):
    class terms(UDPTerms):
        def noise(self, measured, plan, random):
            return super().noise(measured._replace(bound=measured.bound / 2), plan, random)

class Free(UDPClient):
    def handle(self, phase, arrays, fields, train):
        terms = records.read(UDPTerms, fields)
        try:
            trained = train(arrays).arrays
        except Exception:
            trained = arrays
        measured = terms.measure(arrays, trained)
        return terms.noise(measured, terms.plan(arrays, Facts()), SecureRandom())

class Losing(UDP):
    def aggregate_train(self, server_round, replies):
        return super().aggregate_train(server_round, list(replies)[1:])

def test_unclipped(flwr_privacy_audit):
    assert not flwr_privacy_audit(UDP, Unclipped).refuted

def test_quiet(flwr_privacy_audit):
    flwr_privacy_audit(UDP, Quiet)

def test_quiet_crowd(flwr_privacy_crowd):
    flwr_privacy_crowd(UDP, Quiet, clients=40)

def test_free(flwr_privacy_audit):
    flwr_privacy_audit(UDP, Free)

def test_free_and_faults(flwr_privacy_faults):
    flwr_privacy_faults(UDP, Free)

def test_losing(flwr_privacy_faults):
    flwr_privacy_faults(Losing, UDPClient)

class TestFree(WrapsConformance):
    strategy = UDP
    client = Free
    options = {"unit": "user", "rounds": 3, "experiment_id": "e"}
    engine = {"insecure_seed": 7}

class TestLosing(TestFree):
    strategy = Losing
    client = UDPClient
"""
)

PLANTED = {
    "test_unclipped": r"UDP, users: refuted: .*a canary reaches too far",
    "test_quiet": r"UDP, users: refuted: .*noise as a whole \(0\.[45]\d* of what was paid for\)",
    "test_quiet_crowd": r"UDP, users, a crowd: refuted: .*noise as a whole",
    "test_free": r"UDP, users: refuted: a release is not charged \(client 0: \d answers, 0 charges",
    "test_free_and_faults": r"it answers without showing the head of its ledger",
    "test_losing": r"a reply is lost: without .* the model is the same",
    "test_each_charge_on_the_card_is_in_its_clients_ledger": r"answered without a charge",
    "test_no_answer_is_lost": r"an answer of round 2 is lost",
}


def test_the_file_on_the_page_passes_with_what_pip_installs(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(BARE)
    pytester.makepyfile(PRINTED[0])
    result = pytester.runpytest_subprocess("--quiet")
    outcomes = result.parseoutcomes()
    assert set(outcomes) <= {"passed", "warnings"}
    assert outcomes["passed"] > 40


def test_planted_bugs_fail_and_say_what_is_wrong(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(WRONG)
    names = " or ".join(PLANTED)
    result = pytester.runpytest_subprocess("--quiet", "--show-capture=no", "-k", names)
    text = result.stdout.str()
    reports = re.split(r"^_+ ([\w.]+) _+$", text, flags=re.MULTILINE)
    said: dict[str, str] = {}
    for name, report in zip(reports[1::2], reports[2::2], strict=True):
        test = name.rpartition(".")[2]
        said[test] = said.get(test, "") + report
    assert set(said) == set(PLANTED), text
    for name, words in PLANTED.items():
        assert re.search(words, said[name]), said[name]


SMALL = """
import sys

def test_nothing_large_is_loaded(request):
    large = {"flwr", "numpy", "scipy", "torch", "dp_accounting", "cryptography"}
    assert not large & set(sys.modules)
    assert request.config.pluginmanager.hasplugin(NAME)
"""


def test_it_costs_nothing_where_it_is_not_used(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone: plugins of others load what they like."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(SMALL.replace("NAME", repr(plugin.__name__)))
    result = pytester.runpytest_subprocess("-p", plugin.__name__)
    result.assert_outcomes(passed=1)


def test_an_installed_package_brings_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_it_is_there(request):
            assert request.config.pluginmanager.hasplugin("flwr-privacy")
            assert "flwr" not in sys.modules
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_it_can_be_turned_off(pytester: pytest.Pytester) -> None:
    """Conformance classes work without it; of a fixture pytest says that it is not there."""
    pytester.makepyfile(
        """
        from flwr_privacy.clients import FedAvgClient
        from flwr_privacy.simulations.testing import WrapsConformance
        from flwr_privacy.strategies import FedAvg

        class TestMine(WrapsConformance):
            strategy = FedAvg
            client = FedAvgClient

        def test_mine(flwr_privacy_audit):
            pass
        """
    )
    only = "test_mine or test_no_answer_is_lost"
    result = pytester.runpytest_subprocess("-p", "no:flwr-privacy", "-k", only)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*fixture 'flwr_privacy_audit' not found*"])


def test_its_fixtures_have_a_prefix() -> None:
    prefix = "flwr_privacy_"
    assert plugin.__all__
    assert all(name.startswith(prefix) for name in plugin.__all__)
    own = {name for name, value in vars(plugin).items() if "Fixture" in type(value).__name__}
    assert own == set(plugin.__all__)
