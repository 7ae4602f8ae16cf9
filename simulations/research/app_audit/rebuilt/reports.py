"""What the findings of the attacks have in common."""

from ..findings import LEFT_OUT, Finding

__all__ = ["EVERYBODY", "SERVER", "SIGNIFICANCE", "left_out"]

SERVER = "the server: it knows the app and the model that it sent, and sees each upload by itself"
SIGNIFICANCE = 0.001
"""Chance that one attack on what says nothing is called a leak: a report has many attacks."""

EVERYBODY = "everybody who has the models of the first and of the last round: server and clients"


def left_out(name: str, why: str) -> Finding:
    """Return the finding of an attack that was not made, with the reason."""
    return Finding(
        part="rebuilt",
        name=name,
        verdict=LEFT_OUT,
        said=f"Not tried: {why}.",
        adversary=SERVER,
        chance="not measured",
    )
