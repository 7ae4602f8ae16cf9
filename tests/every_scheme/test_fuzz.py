"""Messages that were changed at random, of every scheme, in either direction.

A server meets nothing but counted refusals or one error of the library; a node refuses with one.
The seed is in the header of the report: FLWR_PRIVACY_FUZZ_SEED=... repeats it, and
FLWR_PRIVACY_FUZZ_SECONDS=3600 runs it for an hour.
"""

import os
import random
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
from fuzzing import FuzzedGrid

from flwr_privacy.errors import FlwrPrivacyError
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.reliability.federations import FEDERATIONS, SEED, SmallFederation

SECONDS = float(os.environ.get("FLWR_PRIVACY_FUZZ_SECONDS", "60")) / (2 * len(FEDERATIONS))
FEWEST = 5  # trainings, and changed messages in them, however slow the machine is
DIRECTIONS = {"replies": {"replies": 0.2}, "requests": {"requests": 0.2}}


def train(federation: SmallFederation, draws: random.Random, **shares: float) -> int:
    """Train with changed messages; return how many were changed."""
    with tempfile.TemporaryDirectory() as folder:
        kept, state = Path(folder, "nodes"), Path(folder, "state")
        kept.mkdir()
        state.mkdir()
        grid = FuzzedGrid(
            federation.app(federation.client),
            federation.nodes(kept),
            state=state,
            insecure_seed=SEED,
            draws=draws,
            **shares,
        )
        try:
            with acting_as_server(grid.run_id):
                result = federation.build().start(
                    grid, federation.arrays(), num_rounds=2, timeout=5.0
                )
            arrays = [array.numpy() for array in result.arrays.values()]
            assert all(np.isfinite(array).all() for array in arrays), "the model is not finite"
        except FlwrPrivacyError:
            pass  # one error, which says why
        finally:
            grid.close()
    assert not grid.crashed, grid.crashed
    return grid.changed


@pytest.mark.long
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", FEDERATIONS)
def test_changed_messages_are_refused(name: str, direction: str) -> None:
    base = f"{os.environ['FLWR_PRIVACY_FUZZ_SEED']} {name} {direction}"
    end, training, changed = time.monotonic() + SECONDS, 0, 0
    while time.monotonic() < end or training < FEWEST:
        draws = random.Random(f"{base} {training}")
        try:
            changed += train(FEDERATIONS[name], draws, **DIRECTIONS[direction])
        # Whatever comes out is a finding, and how to repeat it is what it is worth.
        except Exception as error:  # noqa: BLE001
            text = "".join(traceback.format_exception(error)[-6:])
            pytest.fail(f"seed {base!r}, training {training}: {text}")
        training += 1
    assert changed >= FEWEST, "the trainings end before anything is changed"
    print(f"{changed} changed messages in {training} trainings")
