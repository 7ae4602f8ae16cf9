"""What the trainings of M2FDP's tests leave out, as it takes time and shows nothing."""

import pytest


@pytest.fixture
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the nodes at once: all of them are there before the training starts."""
    monkeypatch.setattr("flwr_privacy.strategies.requests.federation._SETTLE", 0.0)


@pytest.fixture
def one_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last card of a run state epsilon by one accountant: by every one takes seconds."""
    from flwr_privacy.strategies import M2FDP

    card = M2FDP.card
    monkeypatch.setattr(M2FDP, "card", lambda self, *, final=False: card(self))
