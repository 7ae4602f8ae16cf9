"""The metadata: the citation and the versions agree, and apps are built in the newest format."""

import io
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from flwr.cli.app import app as flwr
from typer.testing import CliRunner

from flwr_privacy import __version__
from flwr_privacy.simulations.cli.entry import EXTRAS, main
from flwr_privacy.simulations.operations.checks import FIRST_FLWR_TOO_NEW, OLDEST_FLWR
from tests.shared.imports import ROOT, foreign, reached

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
QUICKSTARTS = sorted((ROOT / "simulations" / "quickstarts").glob("pytorch-*"))
APPS = [ROOT / "simulations", *QUICKSTARTS]
DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow", "ray": "flwr[simulation]"}
"""The distribution of a package whose name differs."""


def test_the_citation_is_of_this_version_and_licence() -> None:
    assert CITATION["cff-version"] == "1.2.0"
    assert CITATION["title"] == PROJECT["name"]
    assert CITATION["version"] == __version__
    assert CITATION["license"] == PROJECT["license"] == "Apache-2.0"
    assert CITATION["keywords"] == PROJECT["keywords"]
    assert CITATION["abstract"] == PROJECT["description"] + "."
    assert CITATION["authors"] == [{"name": "The flwr-privacy authors"}]


def test_the_citation_names_the_five_papers_as_the_pages_do() -> None:
    references = CITATION["references"]
    assert len(references) == 5
    pages = (ROOT / "docs" / "facts").glob("*.md")
    text = " ".join(" ".join(page.read_text(encoding="utf-8").split()) for page in pages)
    for paper in references:
        assert paper.keys() >= {"type", "title", "authors"}
        assert f'"{paper["title"]}"' in text
        for author in paper["authors"]:
            assert set(author) == {"given-names", "family-names"}


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(r"^## (\S+)", text, re.M)
    assert found
    assert found[1] == __version__


def test_all_say_the_same_flwr() -> None:
    """The distribution, the apps and `doctor` allow the same versions."""
    specifier = f">={'.'.join(map(str, OLDEST_FLWR))},<{FIRST_FLWR_TOO_NEW[0]}"
    extras = PROJECT["optional-dependencies"]
    assert f"flwr{specifier}" in PROJECT["dependencies"]
    assert f"flwr[simulation]{specifier}" in extras["simulation"]
    for app in APPS:
        project = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert {f"flwr{specifier}", f"flwr[simulation]{specifier}"} & {*project["dependencies"]}
    own = tomllib.loads((ROOT / "simulations" / "pyproject.toml").read_text())["project"]
    assert own["version"] == __version__


def test_the_command_line_knows_what_the_extras_bring() -> None:
    for extra, packages in EXTRAS.items():
        brought = {re.split(r"[<>=]", line)[0] for line in PROJECT["optional-dependencies"][extra]}
        for package in packages:
            name = DISTRIBUTIONS.get(package, package.replace("_", "-"))
            assert name in brought, f"{package} in {extra}"
    base = {re.split(r"[<>=]", line)[0] for line in PROJECT["dependencies"]}
    for extra in EXTRAS:
        for line in PROJECT["optional-dependencies"][extra]:
            name = re.split(r"[<>=]", line)[0]
            packages = [package for brought in EXTRAS.values() for package in brought]
            told = {DISTRIBUTIONS.get(package, package.replace("_", "-")) for package in packages}
            assert name in told | base | {"rich"}, f"{name} of {extra}"


@pytest.mark.parametrize(
    ("module", "extra"), [("torch.nn", "simulation"), ("opacus", "dp-sgd"), ("flwr", None)]
)
def test_a_command_names_the_extra_that_it_lacks(
    module: str,
    extra: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def needs_it() -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("flwr_privacy.simulations.cli.entry._app", needs_it)
    with pytest.raises(SystemExit if extra else ModuleNotFoundError) as raised:
        main()
    if extra:
        package = module.partition(".")[0]
        told = f"error: {package} is not installed: pip install 'flwr-privacy[{extra}]'\n"
        assert capsys.readouterr().err == told
        assert raised.value.code == 4


def test_the_noise_of_udp_is_planned_without_an_extra() -> None:
    # A profile is imported only where one is made.
    brought = (packages for extra, packages in EXTRAS.items() if extra != "profile")
    packages = {package for packages in brought for package in packages}
    for module in ("formulas", "rival_noise", "udp_run"):
        assert not foreign_of_all(f"flwr_privacy.simulations.calibration.{module}") & packages


def foreign_of_all(module: str) -> set[str]:
    """Return the packages that a module and those that it imports bring."""
    return {name for one in reached({module}) for name in foreign(one)}


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # in flwr
@pytest.mark.parametrize("app", APPS, ids=[app.name for app in APPS])
def test_an_app_is_built_in_format_1_with_its_licence_and_no_warning(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(flwr, ["build", "--app", str(app)])
    assert done.exit_code == 0, done.output
    (line,) = done.output.splitlines()  # a warning would be another
    assert "Successfully built" in line
    (fab,) = tmp_path.glob("*.fab")
    with zipfile.ZipFile(io.BytesIO(fab.read_bytes())) as bundle:
        assert bundle.read("LICENSE") == (ROOT / "LICENSE").read_bytes()
        built = tomllib.loads(bundle.read("pyproject.toml").decode())
    assert built["tool"]["flwr"]["app"]["fab-format-version"] == 1
