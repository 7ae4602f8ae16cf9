"""Runs apps for a SuperNode with ``--isolation process``: those that its operator allows.

Flower's own SuperExec unpacks and imports whatever app the server sends. This one compares the
bytes of the app with the operator's list first, in a new process for each message. What follows
the check is as in Flower (`flwr.supernode.runtime.run_clientapp`) but for two things. It unpacks
into a new folder: Flower takes a folder that is already there for the app if its name and eight
digits of the hash fit. And it never installs packages that an app asks for.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from logging import ERROR, INFO, WARNING
from pathlib import Path

import httpx
from flwr.app import Context, Error, Message
from flwr.cli.install import install_from_fab
from flwr.clientapp.client_app import LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore import log
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from flwr_privacy.clients.node.context_store import DATA_SET_VARIABLE
from flwr_privacy.errors import DeclinedError, EngineError, FlwrPrivacyError, InvalidParameterError

from .allowed_apps import AllowedApps
from .superlink_checks import is_loopback

__all__ = ["RuntimeAPI", "execute", "read_secret"]

ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})
SECRET = "--superexec-auth-secret-file"
POLL = 0.5  # seconds between two looks for a task


@dataclass(frozen=True, kw_only=True)
class RuntimeAPI:
    """Where a SuperNode hands out tasks.

    Parameters
    ----------
    address : str
        Its host and port.
    certificates : Path, optional
        The CA's certificate. Without it the connection is plain, and the host a loopback address.

    Raises
    ------
    InvalidParameterError
        If the connection would be plain to another machine, or the certificate cannot be read.
    """

    address: str
    certificates: Path | None = None

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not port.isdigit() or not host:
            raise InvalidParameterError("--runtime-api-address", self.address, "host:port")
        if self.certificates is not None:
            if not os.access(self.certificates, os.R_OK):
                allowed = "a file that can be read"
                raise InvalidParameterError("--root-certificates", str(self.certificates), allowed)
        elif not is_loopback(host.strip("[]")):
            allowed = "an address of this machine, or --root-certificates"
            raise InvalidParameterError("--runtime-api-address", self.address, allowed)

    def client(
        self, retries: RetryInvoker | None, *interceptors: ProtobufClientInterceptor
    ) -> RuntimeHttpClient:
        """Return a connection."""
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.certificates is None,
            root_certificates=None if self.certificates is None else self.certificates.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor("flwr-privacy executor"), *interceptors],
            retry_invoker=retries,
        )


def read_secret(path: Path) -> bytes:
    """Return the secret that executor and SuperNode share.

    Raises
    ------
    InvalidParameterError
        If the file is empty or cannot be read.
    """
    try:
        secret = path.read_bytes()
    except OSError as error:
        allowed = f"a file that can be read ({error.strerror})"
        raise InvalidParameterError(SECRET, str(path), allowed) from error
    if not secret:
        raise InvalidParameterError(SECRET, str(path), "a file that is not empty")
    return secret


def execute(api: RuntimeAPI, allowed_apps: Path, secret: bytes) -> None:
    """Start a process for each message that the SuperNode gets, until this process is stopped.

    Parameters
    ----------
    api : RuntimeAPI
        The SuperNode.
    allowed_apps : Path
        The operator's list; it is read again for every message.
    secret : bytes
        What the SuperNode has as ``--superexec-auth-secret-file``.

    Raises
    ------
    InvalidParameterError
        If the list cannot be read.
    EngineError
        If the SuperNode has another secret, or gives messages to others too: to Flower's own
        SuperExec, which runs any app, or to whoever is on this machine.
    """
    apps = AllowedApps.read(allowed_apps)
    log(INFO, "flwr-privacy executor: %s allows %d apps", allowed_apps, len(apps.apps))
    if shared := apps.sharing():
        log(WARNING, "%s share one ledger: give each a data_set in %s", shared, allowed_apps)
    signed = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=ACQUIRE)
    client = api.client(None, signed)
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    processes = multiprocessing.get_context("spawn")
    _check_closed(api)
    while True:
        time.sleep(POLL)
        try:
            answer = client.AcquireTask(request)
        except httpx.HTTPError as error:
            if _refuses(error):
                raise EngineError(f"the SuperNode at {api.address} has another secret") from error
            _check_closed(api)  # it may have been started anew, in another way
            continue
        if answer.HasField("task") and answer.token:
            given = (api, answer.token, allowed_apps, os.getpid())
            processes.Process(target=run_task, args=given).start()
        multiprocessing.active_children()  # collects those that have ended


def _check_closed(api: RuntimeAPI) -> None:
    """Wait for the SuperNode, and check that it refuses whoever does not know the secret."""
    waits = False
    while True:
        try:
            with closing(api.client(None)) as client:
                client.AcquireTask(AcquireTaskRequest())
        except httpx.HTTPError as error:
            if _refuses(error):
                return
            if not waits:
                log(INFO, "waits for the SuperNode at %s: %s", api.address, error)
            waits = True
            time.sleep(POLL)
        else:
            raise EngineError(
                f"the SuperNode at {api.address} gives its messages to others, too, who run any "
                f"app: start it with --isolation process and {SECRET}"
            )


def _refuses(error: httpx.HTTPError) -> bool:
    """Tell whether a SuperNode does not know who asks; otherwise it is not there, or busy."""
    return (
        isinstance(error, httpx.HTTPStatusError)
        and error.response.status_code == httpx.codes.UNAUTHORIZED
    )


def run_task(api: RuntimeAPI, token: str, allowed_apps: Path, executor: int) -> None:
    """Answer one message; this process does nothing else.

    Parameters
    ----------
    api : RuntimeAPI
        The SuperNode.
    token : str
        Stands for the task.
    allowed_apps : Path
        The operator's list.
    executor : int
        Process without which this one ends.
    """
    start_parent_process_monitor(executor)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the folder is removed
    retries = make_simple_http_retry_invoker()
    client = api.client(retries, RuntimeTokenHttpInterceptor(token))
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    context = None
    status, details = SubStatus.FAILED, "the process was stopped"
    try:
        message, context, run, fab = pull_task_input(client)
        reply = _answer(message, context, run, fab, allowed_apps)
        push_message(client, reply, context)
        details = "the app was refused or failed" if reply.has_error() else ""
        status = SubStatus.FAILED if details else SubStatus.COMPLETED
    finally:
        retries.max_tries = 1  # the SuperNode may be gone, too
        push_task_output(client, context, status, details)
        if heartbeat.is_running:
            heartbeat.stop()
        client.close()


def _answer(message: Message, context: Context, run: Run, fab: Fab, allowed_apps: Path) -> Message:
    try:
        allowed = AllowedApps.read(allowed_apps).check(fab.content)
    except FlwrPrivacyError as error:
        # The server's name for the app is in the log only, and marked as its own.
        log(ERROR, "refused, called %r by the server: %s", f"{run.fab_id} {run.fab_version}", error)
        declined = isinstance(error, DeclinedError)
        reason = str(error) if declined else "this node's list of allowed apps cannot be read"
        return Message(Error(ErrorCode.INVALID_FAB, reason), reply_to=message)
    name = allowed.name
    log(INFO, "runs %s, which is allowed", name)
    if allowed.data_set is not None:  # this process runs nothing else
        os.environ[DATA_SET_VARIABLE] = allowed.data_set
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-app-") as folder:
        try:
            app = install_from_fab(fab.content, Path(folder), skip_prompt=True)
            load = get_load_client_app_fn("", str(app), multi_app=True)
            return load(run.fab_id, run.fab_version, "")(message=message, context=context)
        except Exception as error:  # noqa: BLE001
            log(ERROR, "the ClientApp of %s failed", name, exc_info=error)
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            reason = f"{type(error)}:<'{error}'>"  # as Flower has it
            if isinstance(error, LoadClientAppError):
                code = ErrorCode.LOAD_CLIENT_APP_EXCEPTION
                reason = "An exception was raised when attempting to load `ClientApp`"
            return Message(Error(code, reason), reply_to=message)
