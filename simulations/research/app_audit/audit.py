"""Audits an app: runs it, looks at what left the nodes, attacks that, and writes a report.

Each part runs in processes of its own and is kept in ``parts/`` of the audit's folder, so that an
audit which was interrupted goes on with the next part.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flwr_privacy import __version__
from flwr_privacy.errors import EngineError, InvalidParameterError, check_integer, check_number
from flwr_privacy.simulations.inspector.app_folder import PROJECT
from flwr_privacy.wire.files import write_text

from .advice import advice
from .findings import LEFT_OUT, NOTE, PARTS, Finding
from .observed import SERVER, observed
from .processes import run_module, run_probe
from .promise.claims import read_claim
from .promise.verdicts import promise
from .report import AuditReport
from .target import Target, masked
from .transcript import Transcript

__all__ = ["MINUTES", "audit"]

MINUTES = 10.0
"""Time of an audit, unless the caller says another one."""

RECORDS = (1, 2, 4, 8)
"""Records of the clients whose updates are attacked."""

_SHARES = {"as it is": 3.0, "few records": 1.0, "rebuilt": 3.0, "promise": 2.5, "advice": 0.5}
_LEAST = 30.0  # seconds of a step: to start Python and torch takes some of them

Tell = Callable[[str, float], None]
"""Is told which step begins, and which share of the audit is done."""


def audit(
    app: str | Path,
    *,
    out: str | Path | None = None,
    rounds: int | None = None,
    clients: int | None = None,
    minutes: float = MINUTES,
    seed: int = 0,
    model: str | None = None,
    claims: str | None = None,
    canaries: str | None = None,
    tell: Tell = lambda step, done: None,
) -> AuditReport:
    """Audit an unmodified Flower app: say what its server learns.

    The app runs inline, in processes of its own, without a network and without a GPU. Nothing in
    its folder changes.

    Parameters
    ----------
    app : path
        The app's folder, with its pyproject.toml.
    out : path, optional
        Folder of the audit; by default ``runs/audit-NAME``. An audit that was begun there with the
        same settings goes on.
    rounds : int, optional
        Rounds after which the app is stopped; by default it ends by itself.
    clients : int, optional
        Number of clients; by default that of the app's federation, or 10.
    minutes : float, default 10
        Time for everything. Each attack stops at its share of it.
    seed : int, default 0
        Root of all random draws, also those of the app as far as it draws them from Python, NumPy
        and torch.
    model : str, optional
        "module:function" of a function without arguments that returns the app's torch module; by
        default it is the one that a client trained.
    claims : str, optional
        What the app is said to keep, as "epsilon=1,delta=1e-5,unit=user,view=model"; by default
        what the app says by itself: its card, or the settings of Flower's mods and wrappers. See
        `flwr_privacy.simulations.research.app_audit.promise.claims.read_claim`.
    canaries : str, optional
        "module:function" of the app's function that returns the records of the client that trains:
        arrays of one length, in a tuple or a dict, or a Dataset; the first of them where it returns
        several. Canary records are added to them where a claim is about single records. By default
        they are added to what its DataLoaders have.
    tell : callable, optional
        Is told which step begins, and which share of the audit is done.

    Returns
    -------
    AuditReport
        The findings; ``audit.html`` and ``audit.json`` in its folder have the same.

    Raises
    ------
    InvalidParameterError
        If it is no Flower app, a setting is not allowed, or the folder has another audit.
    EngineError
        If the app ended before it asked any node.

    Guarantee
    ---------
    An attack that succeeds proves a leak. One that fails proves nothing: better attacks exist, and
    no audit shows that an app is private.
    """
    target = Target.of(app, clients=clients)
    if rounds is not None:
        check_integer("rounds", rounds, minimum=1)
    if check_number("minutes", minutes) <= 0:
        raise InvalidParameterError("minutes", minutes, "a number above 0")
    check_integer("seed", seed, minimum=0)
    claim = None if claims is None else read_claim(claims)
    if canaries is not None and claim is not None and claim.unit != "record":
        raise InvalidParameterError("canaries", canaries, "nothing, or a claim with unit=record")
    folder = Path("runs", f"audit-{target.app.name}") if out is None else Path(out)
    kept = _Kept(
        folder,
        _key(target, rounds=rounds, seed=seed, model=model, claims=claims, canaries=canaries),
        minutes * 60,
        tell,
    )
    start = time.monotonic()
    as_is = kept.transcript(
        "as it is", lambda path, s: run_probe(target, path, seconds=s, seed=seed, rounds=rounds)
    )
    if not as_is.exchanges:
        raise EngineError(_why_nothing(as_is, folder))
    few = kept.transcript(
        "few records",
        lambda path, s: run_probe(target, path, seconds=s, seed=seed, rounds=1, records=RECORDS),
    )
    findings = [
        *kept.findings("left", lambda s: [*_ended(as_is), *observed(as_is)]),
        *kept.findings("rebuilt", lambda s: _rebuilt(target, as_is, few, folder, s, seed, model)),
        *kept.findings(
            "promise",
            lambda s: promise(
                target,
                as_is,
                claim=claim,
                seconds=s,
                seed=seed,
                folder=folder / "canaries",
                canaries=canaries,
                model=model,
            ),
        ),
    ]
    findings += kept.findings("advice", lambda s: advice(target, findings))
    report = AuditReport(
        name=target.app.name,
        folder=folder,
        settings={
            "clients": target.clients,
            "rounds": rounds,
            "minutes": minutes,
            "seed": seed,
            "claims": claims,
            "canaries": canaries,
            "version": __version__,
            "config": masked(target.app.config),
        },
        seconds=round(time.monotonic() - start, 1),
        findings=tuple(findings),
    )
    report.write()
    return report


class _Kept:
    """The folder of an audit: what is done already is read from it.

    Parameters
    ----------
    folder : Path
        The folder.
    key : str
        Digest of the app and the settings.
    seconds : float
        Time of the audit.
    tell : callable
        Is told which step begins.
    """

    def __init__(self, folder: Path, key: str, seconds: float, tell: Tell) -> None:
        self._folder, self._tell = folder, tell
        self._end = time.monotonic() + seconds
        self._left = dict(_SHARES)
        about = folder / "key.txt"
        if about.exists() and about.read_text(encoding="utf-8") != key:
            allowed = "a folder without the audit of another app, of other settings or other files"
            raise InvalidParameterError("out", str(folder), allowed)
        (folder / "parts").mkdir(parents=True, exist_ok=True)
        write_text(about, key)

    def transcript(self, step: str, run: Callable[[Path, float], Transcript]) -> Transcript:
        """Return the transcript of a step, from the folder or from a run."""
        path = self._folder / step.replace(" ", "-")
        seconds = self._begin(step)
        done = path / "done"
        if not done.exists():
            if path.exists():
                path.rename(_unused(path))  # an interrupted run
            run(path, seconds)
            done.touch()
        return Transcript(path)

    def findings(self, part: str, find: Callable[[float], Sequence[Finding]]) -> list[Finding]:
        """Return the findings of a part, from the folder or from what finds them."""
        path = self._folder / "parts" / f"{part}.json"
        seconds = self._begin(part)
        if not path.exists():
            found = [one.as_json() for one in find(seconds)]
            write_text(path, json.dumps(found, indent=1))
        return [Finding.from_json(one) for one in json.loads(path.read_text(encoding="utf-8"))]

    def _begin(self, step: str) -> float:
        """Return the time of a step: its share of what is left."""
        whole = sum(_SHARES.values())
        self._tell(PARTS.get(step, step), 1 - sum(self._left.values()) / whole)
        share = self._left.pop(step, 0.0)
        rest = share + sum(self._left.values())
        return max(_LEAST, (self._end - time.monotonic()) * share / rest) if rest else _LEAST


def _unused(path: Path) -> Path:
    number = 1
    while (other := path.with_name(f"{path.name}-interrupted-{number}")).exists():
        number += 1
    return other


def _key(target: Target, **settings: Any) -> str:
    """Return a digest of an app's files and of what an audit of it depends on."""
    digest = hashlib.sha256(json.dumps([__version__, target.clients, settings]).encode())
    files = [target.app.path / PROJECT, *(s.path for s in target.app.sources.values())]
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _why_nothing(transcript: Transcript, folder: Path) -> str:
    about = transcript.about
    why = about["error"] or f"the run ended ({about['ended']})"
    if about["network"]:
        why += f"; it asked the network for {', '.join(sorted(set(about['network'])))}"
    return f"the app asked no node anything: {why}. What it printed: {folder / 'as-it-is/log.txt'}"


def _ended(transcript: Transcript) -> list[Finding]:
    """Say how the run ended, unless by itself."""
    about = transcript.about
    if about["ended"] == "whole":
        return []
    why = {
        "stopped": "The app did not end within its share of the time; what was sent until then "
        "counts.",
        "crashed": f"The app crashed: {about['error']}. What was sent until then counts.",
    }.get(about["ended"], f"The run was ended: {about['ended']}.")
    return [
        Finding(
            part="left",
            name="how the run ended",
            verdict=NOTE,
            said=why,
            adversary=SERVER,
            chance="not measured",
        )
    ]


def _rebuilt(
    target: Target,
    as_is: Transcript,
    few: Transcript,
    folder: Path,
    seconds: float,
    seed: int,
    model: str | None,
) -> list[Finding]:
    """Run the attacks in a process of their own, as they load the app's model."""
    out = folder / "rebuilt"
    asked = {
        "as_is": str(as_is.folder.resolve()),
        "few": str(few.folder.resolve()),
        "seconds": seconds,
        "seed": seed,
        "out": str(out.resolve()),
        "model": model,
    }
    log = out / "log.txt"
    in_time = run_module("rebuilt", asked, target=target, seconds=seconds + _LEAST, log=log)
    path = out / "findings.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        return [Finding.from_json(one) for one in found]
    lines = log.read_text(encoding="utf-8").strip().splitlines()
    why = "the time was over" if not in_time else lines[-1] if lines else "no reason was given"
    return [
        Finding(
            part="rebuilt",
            name="attacks",
            verdict=LEFT_OUT,
            said=f"The attacks did not run: {why}.",
            adversary=SERVER,
            chance="not measured",
        )
    ]
