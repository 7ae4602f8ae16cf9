"""This library inline, with two worker processes."""

import logging

__all__ = ["main"]

WORKERS = 2
CLIENT_APP = "benchmarks.simulators.app.simulated.client_app:app"


def main() -> None:
    """Run a plan, and write down the seconds."""
    # Not above: the workers, which import this file, have no use for it.
    from flwr_privacy.simulations.engines.inline import run_inline

    from .app.simulated import server_app, work

    parser = work.parser()
    parser.add_argument("--plan", required=True)
    asked = parser.parse_args()

    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_inline(
        server_app.app,
        CLIENT_APP,
        nodes=WORKERS,
        workers=WORKERS,
        run_config={**vars(asked), "virtual": True, "sigma": 0.0},
    )


if __name__ == "__main__":
    main()
