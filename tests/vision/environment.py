"""Makes `.venv-vision`, which has torchvision: `python -m tests.vision.environment`.

The wheels of torchvision on PyPI import only with the torch on PyPI that was built beside them. So
where the torch here is another build of the same version (`2.13.0+cpu`), the environment has that
one too; on Linux it is built for CUDA, has gigabytes, and needs no GPU.
"""

import subprocess
import tomllib
from importlib.metadata import version

from tests.environments import ROOT, made

FOUND = """
import torch, torchvision
print(f"torch {torch.__version__} and torchvision {torchvision.__version__}")
"""


def wanted() -> list[str]:
    """Return what pip is asked for: the newest torchvision for the torch whose version is here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    release = version("torch").partition("+")[0]
    # `==2.13.0` would be content with `2.13.0+cpu`.
    return [f"torch==={release}", *project["optional-dependencies"]["vision"]]


if __name__ == "__main__":
    python = made("vision", *wanted())
    subprocess.run([python, "-c", FOUND], check=True)
