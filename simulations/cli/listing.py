"""Extends `--help` of `run` and `deploy` by what there is: schemes, tasks, parameters."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import click
from typer.core import TyperCommand

__all__ = ["ListingCommand"]

_WIDTH, _INDENT = 96, 6


class ListingCommand(TyperCommand):
    """A command whose help lists the schemes, or the parameters of the scheme that is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note which scheme is asked for: `--help` ends the command before options are read."""
        ctx.meta[__name__] = _scheme_in(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help of the options, and below it the listing.

        Raises
        ------
        InvalidParameterError
            If there is no scheme of the name that is given.
        """
        name = ctx.meta.get(__name__)
        lines = list(_everything() if name is None else _of_scheme(name))
        super().format_help(ctx, formatter)
        formatter.write("\n".join(lines) + "\n")


def _scheme_in(args: list[str]) -> str | None:
    """Return the scheme that a command line names, if there is one."""
    for place, argument in enumerate(args):
        option, equals, value = argument.partition("=")
        if option == "--scheme":
            return value if equals else next(iter(args[place + 1 :]), None)
        if argument == "--set" and args[place + 1 : place + 2]:
            key, _, value = args[place + 1].partition("=")
            if key == "scheme":
                return value
    return None


def _everything() -> Iterator[str]:
    # Imported late: torch takes seconds, which only this help has to wait for.
    from flwr_privacy.simulations.settings.run_settings import PARTITIONS
    from flwr_privacy.simulations.settings.schemes import SCHEMES
    from flwr_privacy.simulations.tasks.lookup import installed_tasks
    from flwr_privacy.simulations.tasks.tasks import TASKS
    from flwr_privacy.simulations.tasks.vertical_tasks import VERTICAL_TASKS

    yield "Schemes and baselines (--scheme); --scheme NAME --help lists the parameters of one:"
    yield from _table({name: scheme.description for name, scheme in SCHEMES.items()})
    yield "Tasks (--task), of clients that have records of their own:"
    yield from _table({name: task.description for name, task in TASKS.items()})
    if installed := installed_tasks():
        yield "Tasks that installed packages bring, of clients that have records of their own:"
        yield from _table({name: entry.value for name, entry in installed.items()})
    yield "Tasks of fedvs and its baselines, whose clients have columns of the same records:"
    yield from _table({name: task.description for name, task in VERTICAL_TASKS.items()})
    yield "Partitions (--partition):"
    yield from _table(PARTITIONS)


def _table(entries: Mapping[str, str]) -> Iterator[str]:
    width = max(map(len, entries)) + 2
    for name, text in entries.items():
        yield from textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=f"  {name:{width}}",
            subsequent_indent=" " * (width + 2),
        )
    yield ""


def _of_scheme(name: str) -> Iterator[str]:
    from flwr_privacy.simulations.settings.parameter_help import parameters_of
    from flwr_privacy.simulations.settings.run_settings import Settings
    from flwr_privacy.simulations.settings.schemes import scheme

    chosen = scheme(name)
    settings = {entry.name for entry in fields(Settings)}
    usual = _usual(chosen.usual)
    fixed = chosen.fixed(Settings(scheme=name, clients=2)).keys()
    yield f"{name}: {chosen.description}."
    yield "Its own parameters, as --set NAME=VALUE, with their defaults:"
    for one in parameters_of(chosen.strategy):
        if one.name in settings or one.name in fixed:
            continue
        required = one.default == "required"
        head = f"  {one.name} (required)" if required else f"  {one.name} = {one.default}"
        if one.name in usual:
            head += f" (in a simulation {usual[one.name]})"
        if one.only:
            head += f"  [with {' or '.join(one.only)}]"
        yield from textwrap.wrap(head, _WIDTH, subsequent_indent=" " * _INDENT)
        indent = " " * _INDENT
        yield from textwrap.wrap(one.text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _usual(usual: Any) -> dict[str, Any]:
    """Return the values that a simulation takes where none is set, for any unit."""
    units: list[dict[str, Any]] = [{}, {"unit": "record"}, {"unit": "device"}]
    return {
        key: value for unit in units for key, value in usual(unit, None).items() if key not in unit
    }
