"""What a node loads: the packages import what they are asked for, and a client half little."""

import ast
import importlib
import io
import json
import pkgutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

PACKAGES = [
    "flwr_privacy.clients",
    *(f"flwr_privacy.{name}" for name in ("accounting", "acfl", "m2fdp", "mspdq")),
    *(f"flwr_privacy.{name}" for name in ("secure_sum", "udp")),
]


def code_lines(path: str) -> int:
    """Return the lines of a module without comments, docstrings and blank lines."""
    source = Path(path).read_text(encoding="utf-8")
    texts = [
        range(node.lineno, (node.end_lineno or 0) + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER}
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in no_code | {tokenize.INDENT, tokenize.DEDENT}
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines.difference(*texts))


def loaded(statement: str) -> dict[str, str]:
    """Return our modules, and their files, in a process that has run a statement."""
    code = (
        f"import json, sys\n{statement}\n"
        "print(json.dumps({n: m.__file__ for n, m in sys.modules.items()"
        " if n.split('.')[0] == 'flwr_privacy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    modules: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return modules


@pytest.mark.parametrize(
    ("client", "most"), [("UDPClient", 6450), ("CentralDPClient", 6250), ("FedAvgClient", 4800)]
)
def test_what_a_client_half_loads_can_be_read(client: str, most: int) -> None:
    modules = loaded(f"from flwr_privacy.clients import {client}, as_mod")
    del modules["flwr_privacy"]  # names for people to import: no code
    assert sum(map(code_lines, modules.values())) <= most
    research = ("theory", "rehearsal", "scenes", "attacks", "strategies", "simulations")
    found = [name for name in modules if not set(research).isdisjoint(name.split("."))]
    assert set(found) <= {"flwr_privacy.clients.node.rehearsal"}  # the one before a charge


HALVES = (
    *("FedAvgClient", "SecureSumClient", "UDPClient", "CentralDPClient"),
    *("MSPDQClient", "ACFLClient", "M2FDPClient", "FedVSClient"),
)


@pytest.mark.parametrize("client", HALVES)
def test_a_client_half_loads_no_large_library_before_it_needs_one(client: str) -> None:
    """A deployed node has a process for each message; scipy alone takes it a fifth of a second."""
    code = (
        f"import sys\nfrom flwr_privacy.clients import {client}, as_mod\nas_mod({client})\n"
        "print({'scipy', 'torch', 'dp_accounting', 'galois', 'sklearn'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_the_library_shows_what_people_use_and_loads_none_of_it_before() -> None:
    assert set(loaded("import flwr_privacy")) == {"flwr_privacy", "flwr_privacy.lazy"}
    code = (
        "import sys, flwr_privacy.udp, flwr_privacy.accounting\n"
        "assert not {'flwr', 'torch', 'numpy.testing', 'pandas'} & sys.modules.keys()\n"
        "from flwr_privacy import UDP, UserLevel, simulate\n"
        "assert callable(simulate) and UDP(privacy=UserLevel()).scheme == 'udp'\n"
        "assert not {'pandas', 'matplotlib', 'ray', 'sklearn'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    import flwr_privacy

    for name in flwr_privacy.__all__:
        assert getattr(flwr_privacy, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'flwr_privacy' has no attribute 'nothing'"):
        _ = flwr_privacy.nothing


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_the_names_that_it_says(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    # Afterwards, when all modules are loaded, a name is still what it was, and no module.
    for each in pkgutil.iter_modules(module.__path__):
        if each.name != "torch":
            importlib.import_module(f"{package}.{each.name}")
    for name in module.__all__:
        assert not isinstance(getattr(module, name), type(module)), name
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_loads_its_modules_when_they_are_asked_for(package: str) -> None:
    own = {name for name in loaded(f"import {package}") if name.startswith(f"{package}.")}
    assert own <= {f"{package}.sensitivity", f"{package}.promise"}  # functions have these names too
