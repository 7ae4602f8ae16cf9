"""What starts Ray and what starts a deployment each goes one after the other, beside each other."""

import pytest

ALONE = ("ray", "deployed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in ALONE:
            if item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.xdist_group(name))
