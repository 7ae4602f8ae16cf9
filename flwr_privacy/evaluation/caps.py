"""Bounds of what a private evaluation may ask for."""

__all__ = ["ACCURACIES", "LARGEST_CAP", "SMALLEST_CAP"]

SMALLEST_CAP, LARGEST_CAP = 1e-6, 1e6
"""Bounds of the cap of a loss that clients report."""

ACCURACIES = (
    "accuracy",
    *("acc", "eval_acc", "eval_accuracy", "test_acc", "test_accuracy", "val_acc", "val_accuracy"),
)
"""Names of a share of right records. At record level a server can ask for no other metric."""
