"""Options of the loop: seed, identity, clients, deadlines and the run folder."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_privacy.errors import InvalidParameterError, check_flag, check_integer, check_number
from flwr_privacy.keywords import checked_keywords
from flwr_privacy.stragglers import StragglerModel, Stragglers

from .round_logger import RoundLogger

if TYPE_CHECKING:
    from flwr_privacy.wire.pins import Pins

__all__ = ["LoopOptions"]


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Options of the loop that all strategies share.

    Parameters
    ----------
    seed : int, optional
        Root of the seeds of sampling and of simulated stragglers; by default the experiment's
        identity.
    experiment_id : str, optional
        Identity of the experiment; by default a new one, or the checkpoint's on a resume.
    clients : int, optional
        Number of simulated clients, which are shared out among the nodes. By default every node is
        one client.
    quorum : int, optional
        Number of averaged replies after which a round goes on. With simulated stragglers the
        `quorum` fastest clients count, and a refused reply among them is not replaced. Where it is
        counted how many trainings work (`flwr_privacy.privacy.trained_count`), so many have to;
        without a quorum half of the answers.
    deadline : float, optional
        Seconds after which an exchange goes on without the missing replies: real ones, or virtual
        ones where stragglers are simulated. By default the timeout given to `start`.
    stragglers : StragglerModel or another Stragglers, optional
        Simulated answer times on a virtual clock.
    max_reply_bytes : int, default 2**30
        Most bytes of a reply where a scheme cannot tell from its request how large it will be:
        ACFL's setup and the steps of vertical learning. Every other reply may have four times the
        bytes of its request and 64 MiB. A larger one is refused, on a SuperLink before it is built.
    run_dir : path, optional
        Existing folder for the privacy card, ``metrics.jsonl`` and ``checkpoint.bin``. By default a
        run leaves its card and ``metrics.jsonl`` in a new folder
        ``flwr-privacy-runs/<time>-<scheme>`` under the current one, and no checkpoint. The
        environment variable FLWR_PRIVACY_RUNS names another folder for these folders; empty or
        ``none``, there is no card.
    write_card : bool, default True
        Whether a run without `run_dir` leaves a card.
    name : str, optional
        Name of the app or the task on the privacy card; by default that of the Flower app.
    resume : bool, default False
        Whether to go on from the checkpoint in `run_dir`.
    accept_lost_rounds : bool, default False
        Whether to go on from a checkpoint that is older than what `run_dir` shows, such as one from
        a backup. The rounds after it are given up: their charges stay on the privacy card, and the
        training goes on after them with the checkpoint's model. By default it is refused.
    pins : path, optional
        TOML file with the long-term keys of all clients, as the nodes' ``privacy-pins``. A node
        takes part only if it signs its hello with the key that is pinned for its client. By default
        the first key of each client is kept for the experiment.
    forget_keys : tuple of str, default ()
        On a resume without pins: clients whose kept key is forgotten, because they have a new one.
    accept_ledgers : tuple of str, default ()
        On a resume: clients whose ledger is accepted although it is not the one that this server
        saw before, because it was lost or restored from a backup. What is missing in it is written
        into the log, the history and the privacy card. By default such a client is refused.
    on_round : callable, optional
        Called with the history line of every round.
    logger : RoundLogger, optional
        Gets the numbers of every round, after its checkpoint, and is closed at the end of the
        training. What it raises ends the training, which a resume goes on with.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, there is no such folder, or the pins cannot be read.

    Examples
    --------
    >>> from flwr_privacy.strategies import FedAvg, LoopOptions
    >>> strategy = FedAvg(fraction_train=0.5, loop=LoopOptions(seed=1, deadline=30.0))
    """

    seed: int | None = None
    experiment_id: str | None = None
    clients: int | None = None
    quorum: int | None = None
    deadline: float | None = None
    stragglers: StragglerModel | Stragglers | None = None
    max_reply_bytes: int = 2**30
    run_dir: str | Path | None = None
    write_card: bool = True
    name: str | None = None
    resume: bool = False
    accept_lost_rounds: bool = False
    pins: str | Path | None = None
    forget_keys: tuple[str, ...] = ()
    accept_ledgers: tuple[str, ...] = ()
    on_round: Callable[[dict[str, Any]], None] | None = None
    logger: RoundLogger | None = None

    def __post_init__(self) -> None:
        if self.clients is not None:
            check_integer("clients", self.clients, minimum=1)
        if self.quorum is not None:
            check_integer("quorum", self.quorum, minimum=1)
        check_integer("max_reply_bytes", self.max_reply_bytes, minimum=1)
        if self.deadline is not None:
            check_number("deadline", self.deadline, minimum=1e-9)
        if self.accept_lost_rounds and not self.resume:
            raise InvalidParameterError("accept_lost_rounds", True, "resume=True beside it")
        if self.resume and self.run_dir is None:
            raise InvalidParameterError("run_dir", self.run_dir, "the folder to resume from")
        for name in ("forget_keys", "accept_ledgers"):
            clients = getattr(self, name)
            if not isinstance(clients, list | tuple):
                raise InvalidParameterError(name, clients, "a list of client ids")
            object.__setattr__(self, name, tuple(clients))  # TOML has lists
        if self.accept_ledgers and not self.resume:
            raise InvalidParameterError(
                "accept_ledgers", self.accept_ledgers, "nothing, but on a resume"
            )
        if self.forget_keys and (self.pins is not None or not self.resume):
            allowed = "nothing, but on a resume without pins: the pins say the keys"
            raise InvalidParameterError("forget_keys", self.forget_keys, allowed)
        check_flag("write_card", self.write_card)
        if self.run_dir is not None and not self.write_card:
            raise InvalidParameterError("write_card", False, "true with a run_dir: it has the card")
        if self.logger is not None and not isinstance(self.logger, RoundLogger):
            allowed = "an object with the methods log and close (RoundLogger)"
            raise InvalidParameterError("logger", type(self.logger).__name__, allowed)
        if self.name is not None and not isinstance(self.name, str):
            raise InvalidParameterError("name", self.name, "text")
        if self.run_dir is not None and not os.path.isdir(self.run_dir):
            raise InvalidParameterError("run_dir", str(self.run_dir), "a folder that exists")

    def read_pins(self) -> "Pins | None":
        """Return the clients' long-term keys; None without a file of them.

        Raises
        ------
        InvalidParameterError
            If the file cannot be read or holds no pins.
        """
        if self.pins is None:
            return None
        from flwr_privacy.wire.pins import Pins  # late: it loads cryptography

        return Pins.read(self.pins)
