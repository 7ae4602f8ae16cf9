"""An environment of its own for a rival whose packages do not go with ours."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

__all__ = ["pfl_environment"]

FOLDER = Path(__file__).parents[2] / "build" / "simulators"


def pfl_environment() -> Path:
    """Return the folder of an environment with pfl-research; make it if it is not there.

    Raises
    ------
    RuntimeError
        If it cannot be made.
    """
    # The torch that trains on our side, so that both train equally fast.
    torch = f"torch=={version('torch').partition('+')[0]}"
    return _environment(FOLDER / "pfl", ["pfl[pytorch]==0.6.0", torch])


def _environment(folder: Path, packages: list[str]) -> Path:
    stamp = folder / "installed.txt"
    wanted = "\n".join(packages)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return folder
    print(f"(making {folder}: about 1 GB, some minutes)", flush=True)
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    _run(str(folder / "bin" / "pip"), "install", "--quiet", *packages)
    stamp.write_text(wanted, encoding="utf-8")
    return folder


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
