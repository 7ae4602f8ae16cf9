"""What every scheme must pass on a node, baselines included: `every_scheme.CASES` is the table.

A policy binds it; no code of a user's gets data past the charge, or past a refusal of one text; a
kill leaves no answer without a charge; processes that are asked at once are charged alike.
"""

import pytest
from scheme_node import join_any_sum


@pytest.fixture(autouse=True)
def any_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    join_any_sum(monkeypatch)
