"""The defects of Flower that docs/upstream describes are there, as it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = sorted(Path(__file__, "../../docs/upstream").resolve().glob("[a-z]*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_script_of_a_page_prints_what_the_page_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (printed,) = re.findall(r"It prints `(.*?)`", text)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (printed, 0), done.stderr
