"""Refuses options of UDP that do not go together."""

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.evaluation import PrivateEvaluation
from flwr_privacy.udp import (
    DPSGD,
    NONE,
    PLD_SECRET,
    RECORD_UNIT,
    ClientLosses,
    LinearNoise,
    NoiseSchedule,
    PlateauNoise,
    RecordLevel,
    UserLevel,
)
from flwr_privacy.udp.schedule import PAPER

__all__ = ["check_combinations", "check_evaluated"]


def check_combinations(
    privacy: UserLevel | RecordLevel | DPSGD,
    schedule: NoiseSchedule | None,
    *,
    alone: bool,
    secret: bool,
    summed: bool,
) -> None:
    """Refuse options that do not go together.

    Parameters
    ----------
    privacy, schedule
        As of `UDP`.
    alone, secret : bool
        Whether clients are drawn each by itself, and whether it is a secret who is.
    summed : bool
        Whether there is a secure sum.

    Raises
    ------
    InvalidParameterError
        If two do not.
    """
    noise = privacy.noise
    by_clients = schedule is not None and isinstance(schedule.validation, ClientLosses)
    together = (
        (
            by_clients and summed,
            (
                "validation",
                "clients",
                "a function on the server with a secure sum: it sums no losses",
            ),
        ),
        (
            privacy.own_terms and summed,
            (
                "noise",
                noise,
                "'gdp_fixed' or 'paper' and one budget for all with a secure sum: its clients "
                "get the same request",
            ),
        ),
        (
            privacy.shared_noise and not summed,
            ("shared_noise", True, "noise, and a secure sum"),
        ),
        (
            noise == PLD_SECRET and not (secret and alone),
            (
                "noise",
                noise,
                "another one: it takes participants='secret' and client_sampling='poisson', as "
                "it is not sound against who learns the participants, the server included",
            ),
        ),
        (
            secret and noise != PLD_SECRET,
            ("participants", "secret", f"'visible' with noise '{noise}', which gains nothing"),
        ),
        (
            noise == PLD_SECRET and schedule is not None,
            ("noise", noise, "another one with a schedule: it is for noise planned in advance"),
        ),
        (
            noise == PLD_SECRET and (privacy.own_budgets or summed),
            ("noise", noise, "another one with budgets of each client or a secure sum"),
        ),
        (
            alone and summed,
            ("client_sampling", "poisson", "'fixed' with a secure sum"),
        ),
        (
            isinstance(schedule, LinearNoise | PlateauNoise)
            and noise not in ("gdp_fixed", "paper"),
            ("noise", noise, "'gdp_fixed' or 'paper' with noise that falls"),
        ),
    )
    for clash, error in together:
        if clash:
            raise InvalidParameterError(*error)


def check_evaluated(
    privacy: UserLevel | RecordLevel | DPSGD,
    schedule: NoiseSchedule | None,
    evaluation: PrivateEvaluation | None,
) -> None:
    """Refuse options of UDP that do not go with a private evaluation.

    Raises
    ------
    InvalidParameterError
        If there is one.
    """
    if evaluation is None:
        return
    if privacy.noise in (NONE, PAPER, PLD_SECRET):
        raise InvalidParameterError(
            "noise", privacy.noise, "another one with a private evaluation: its cost is not proven"
        )
    if schedule is not None and isinstance(schedule.validation, ClientLosses):
        raise InvalidParameterError(
            "validation", "clients", "a function on the server with a private evaluation"
        )
    if privacy.unit == RECORD_UNIT and evaluation.loss_cap is not None:
        raise InvalidParameterError(
            "loss_cap",
            evaluation.loss_cap,
            "None at record level: a mean of losses cannot be clipped record by record",
        )
