"""Bounds of what a private evaluation may ask for."""

__all__ = [
    "ACCURACIES",
    "LABEL_PREFIX",
    "LARGEST_CAP",
    "MOST_LABELS",
    "SMALLEST_CAP",
    "WITHOUT_BUDGET",
]

SMALLEST_CAP, LARGEST_CAP = 1e-6, 1e6
"""Bounds of the cap of a loss that clients report."""

ACCURACIES = (
    "accuracy",
    *("acc", "eval_acc", "eval_accuracy", "test_acc", "test_accuracy", "val_acc", "val_accuracy"),
)
"""Names of a share of right records. At record level a server can ask for no other metric."""

LABEL_PREFIX = "label-"
"""What the names of the metrics begin with that count evaluated records by label."""

MOST_LABELS = 1024
"""Most labels of a histogram."""

WITHOUT_BUDGET = (
    "a private evaluation takes a share of a privacy budget, and this scheme has none: UDP, "
    "CentralDP, M2FDP and ACFL have"
)
"""What to say where an evaluation is asked of a scheme that promises no differential privacy."""
