"""Environments with some packages in other versions; all else is of the one that runs this."""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent


def made(name: str, *requirements: str) -> str:
    """Make the environment `.venv-NAME` anew, install what pip is asked for; return its Python."""
    folder = ROOT / f".venv-{name}"
    make = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
    subprocess.run(make, check=True)
    python = str(folder / "bin" / "python")
    own = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(own, check=True, capture_output=True, text=True).stdout.strip()
    below = sysconfig.get_path("purelib")
    Path(packages, "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--upgrade"]
    subprocess.run([*pip, *requirements], check=True)
    return python
