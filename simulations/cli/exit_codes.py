"""The exit codes of the command line, as its help tells them."""

from flwr_privacy.simulations.verification.findings import OUTCOMES

__all__ = ["EXIT_CODES", "VERIFY_EXIT_CODES"]

EXIT_CODES = """Exit codes: 0 done, 2 wrong parameter, 3 data missing or damaged, 4 the engine or
the app failed, 5 checkpoint unfit, 6 the two ends disagree, 7 ledger unfit, 8 declined, 9 charged
without an answer, 10 no round gave a model, 11 too few clients train, 12 every answer was refused,
130 interrupted."""

VERIFY_EXIT_CODES = "\n\n".join(
    (
        "Exit codes: 2 wrong parameter, 3 the card or a file of its folder is damaged, 7 a ledger "
        "is damaged, and by the outcome:",
        *(f"{one.exit_code} {one.name}: {one.meaning}." for one in OUTCOMES.values()),
    )
)
