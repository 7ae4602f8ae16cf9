"""The commands `node check`, `node metrics`, `node allow`, `executor`, `key` and `doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.settings.own_code import is_reference, search_current_folder
from flwr_privacy.simulations.settings.run_settings import Settings

from .operator_options import (
    PolicyFile,
    StateFolderOrNone,
    WitnessFolder,
    print_checks,
    write_or_print,
)
from .run_options import DataRoot

__all__ = ["doctor", "executor", "key", "node"]

node = typer.Typer(
    help="Check a node's files, policy, keys and clock; allow apps; write numbers for a monitor.",
    no_args_is_help=True,
)

PinsFile = Annotated[
    Path | None, typer.Option(envvar="FLWR_PRIVACY_PINS", help="TOML file with the others' keys.")
]
IdentityFile = Annotated[
    Path | None,
    typer.Option(envvar="FLWR_PRIVACY_IDENTITY", help="The client's long-term key (PEM)."),
]
KeyFile = Annotated[
    Path | None, typer.Option(help="The SuperNode's key (--auth-supernode-private-key).")
]
CertificateFile = Annotated[
    Path | None, typer.Option(help="The CA's certificate (--root-certificates).")
]

AppsFile = Annotated[
    Path | None,
    typer.Option(
        "--allowed-apps",
        envvar="FLWR_PRIVACY_ALLOWED_APPS",
        help="TOML file with the apps that the node runs.",
    ),
]


@node.command()
def check(
    state: StateFolderOrNone = None,
    policy: PolicyFile = None,
    pins: PinsFile = None,
    identity: IdentityFile = None,
    key: KeyFile = None,
    certificate: CertificateFile = None,
    allowed_apps: AppsFile = None,
    witness: WitnessFolder = None,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="SuperLink to ask for certificate, time, version."),
    ] = None,
) -> None:
    """Check a node; exit code 1 if something is wrong."""
    from flwr_privacy.simulations.operations.node_checks import NodeFiles, check_node

    files = NodeFiles(
        state=state,
        policy=policy,
        pins=pins,
        identity=identity,
        key=key,
        certificate=certificate,
        allowed_apps=allowed_apps,
        witness=witness,
    )
    print_checks(check_node(files, superlink))


@node.command()
def metrics(
    out: Annotated[
        Path | None,
        typer.Option(help="File (*.prom) in the textfile collector's folder; readable by all."),
    ] = None,
    node_name: Annotated[
        str | None,
        typer.Option("--node", help="Name in every number, if one machine has several nodes."),
    ] = None,
    state: StateFolderOrNone = None,
    policy: PolicyFile = None,
    pins: PinsFile = None,
    identity: IdentityFile = None,
    key: KeyFile = None,
    certificate: CertificateFile = None,
    allowed_apps: AppsFile = None,
) -> None:
    """Print a node's numbers for Prometheus, or write them to a file at once."""
    from flwr_privacy.simulations.operations.metrics import metrics_of
    from flwr_privacy.simulations.operations.node_checks import NodeFiles

    files = NodeFiles(
        state=state,
        policy=policy,
        pins=pins,
        identity=identity,
        key=key,
        certificate=certificate,
        allowed_apps=allowed_apps,
    )
    write_or_print(metrics_of(files, node_name), out, mode=0o644)


@node.command()
def allow(
    fab: Annotated[Path, typer.Argument(help="The app, as `flwr build` writes it (*.fab).")],
) -> None:
    """Print the lines that allow an app; append them to the node's --allowed-apps."""
    from flwr_privacy.simulations.operations.allowed_apps import entry_of

    typer.echo(entry_of(fab), nl=False)


def executor(
    allowed_apps: Annotated[
        Path,
        typer.Option(
            envvar="FLWR_PRIVACY_ALLOWED_APPS",
            help="TOML file with the apps that the node runs; read for every message.",
        ),
    ],
    superexec_auth_secret_file: Annotated[
        Path, typer.Option(help="As the SuperNode's; nobody else gets its messages.")
    ],
    runtime_api_address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The SuperNode's --host and --port.")
    ] = "127.0.0.1:9094",
    root_certificates: Annotated[
        Path | None,
        typer.Option(help="The SuperNode's --ssl-ca-certfile; without it, this machine only."),
    ] = None,
) -> None:
    """Run the apps that a node allows, for a SuperNode with --isolation process; refuse others."""
    from flwr_privacy.simulations.operations.executor import RuntimeAPI, execute, read_secret

    api = RuntimeAPI(address=runtime_api_address, certificates=root_certificates)
    execute(api, allowed_apps, read_secret(superexec_auth_secret_file))


def key(
    path: Annotated[Path, typer.Argument(help="File for the private key; it must be new.")],
    client: Annotated[
        str | None, typer.Option(help="Identity of the client; by default the file's name.")
    ] = None,
) -> None:
    """Create a long-term key for a node; print the line with which the other nodes pin it."""
    from flwr_privacy.wire.identity import check_client_id
    from flwr_privacy.wire.pins import Identity

    name = check_client_id(client or path.stem)
    identity = Identity.generate()
    identity.write(path)
    typer.echo(f'"{name}" = "{identity.public}"')


def doctor(
    data_root: DataRoot = None,
    task: Annotated[
        str | None, typer.Option(help="Task for which to suggest a number of workers.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Clients in a round of that task.")] = None,
    database: Annotated[
        Path | None, typer.Option(help="Database of this machine's SuperLink, and nothing else.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Certificate of this machine's SuperLink, likewise.")
    ] = None,
) -> None:
    """Check this machine: versions, Ray, GPUs, ports in use and data, or a SuperLink's files."""
    if database is not None or certificate is not None:
        for name, value in {"--data-root": data_root, "--task": task, "--clients": clients}.items():
            if value is not None:
                allowed = "nothing beside --database and --certificate, which check a SuperLink"
                raise InvalidParameterError(name, str(value), allowed)
        from flwr_privacy.simulations.operations.superlink_checks import check_superlink_files

        print_checks(check_superlink_files(database=database, certificate=certificate))
        return
    from flwr_privacy.simulations.operations.doctor import diagnose

    settings = None
    if task is not None or clients is not None:
        chosen = {"task": task, "clients": clients}
        if task is not None and is_reference(task):
            search_current_folder()
        settings = Settings().with_values({k: v for k, v in chosen.items() if v is not None})
    print_checks(diagnose(data_root, settings))
