"""Lines of a run's metrics, as a strategy writes them."""


def line(number, *, rounds=5, **more):
    return {
        "round": number,
        "rounds": rounds,
        "asked": 4,
        "answered": 4,
        "accumulated": 4,
        "late": 0,
        "refused": {},
        "bytes_down": 400,
        "bytes_up": 100,
        "virtual_seconds": 2.0 * number,
        "seconds": 0.5 * number,
        "server": {"accuracy": 0.1 * number, "loss": 2.0 / (1 + number)},
        **more,
    }
