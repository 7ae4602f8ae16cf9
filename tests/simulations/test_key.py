from pathlib import Path

import pytest
from typer.testing import CliRunner

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.cli import app
from flwr_privacy.wire.pins import Identity, Pins


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["key", *arguments], catch_exceptions=False)
    return result.stdout


def test_the_line_that_is_printed_pins_the_key(tmp_path: Path) -> None:
    lines = ["[clients]\n", run(str(tmp_path / "ward-6.pem"))]
    lines.append(run(str(tmp_path / "other.pem"), "--client", "ward-7"))
    (tmp_path / "pins.toml").write_text("".join(lines))
    pins = Pins.read(tmp_path / "pins.toml")
    for client, file in (("ward-6", "ward-6.pem"), ("ward-7", "other.pem")):
        signature = Identity.read(tmp_path / file).sign("text")
        pins.verify(client, signature, "text")
    assert (tmp_path / "ward-6.pem").stat().st_mode & 0o077 == 0


def test_a_key_is_never_overwritten_nor_made_for_nobody(tmp_path: Path) -> None:
    run(str(tmp_path / "ward-6.pem"))
    with pytest.raises(InvalidParameterError, match="never overwritten"):
        run(str(tmp_path / "ward-6.pem"))
    with pytest.raises(InvalidParameterError, match="client"):
        run(str(tmp_path / "a b.pem"))
    assert not (tmp_path / "a b.pem").exists()
