"""The options of an emulated cluster, and the command that starts a job on its hosts.

The cluster itself is made by a module of the experiments, registered as ``hosts``, which runs as a
program of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import click

from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.extensions import require_extension
from ddltrace.tracer.launch.command_of_each_rank import command_of_each_rank

_OPTIONS: Final = (
    click.option(
        "--hosts",
        type=int,
        metavar="N",
        help="Run the ranks on N emulated hosts: network namespaces behind links of --bandwidth. "
        "A COMMAND is started once for each rank; of torchrun, only the script and its arguments "
        "are used. Needs root and iproute2.",
    ),
    click.option("--bandwidth", metavar="RATE", help="Rate of each host's link, e.g. 400mbit."),
    click.option("--ranks-per-host", type=int, metavar="N", help="Ranks on each host."),
    click.option("--hosts-per-rack", type=int, metavar="N", help="Hosts that share a switch."),
    click.option(
        "--bandwidth-between",
        metavar="RATE",
        help="Rate of each rack's link to the core.  [default: no less than its hosts can send]",
    ),
    click.option(
        "--slow-host",
        metavar="host=N,factor=F[,at=S]",
        help="Divide the rate of one host's link by F, from the start or from second S on.",
    ),
    click.option(
        "--delay", metavar="TIME", help="One-way delay between hosts, e.g. 2ms (needs sch_netem)."
    ),
    click.option("--loss", metavar="SHARE", help="Lost packets, e.g. 0.1% (needs sch_netem)."),
)
NAMES: Final = (
    *("hosts", "bandwidth", "ranks_per_host", "hosts_per_rack", "bandwidth_between"),
    *("slow_host", "delay", "loss"),
)
"""Names of the options' values, in the order of the options."""

F = TypeVar("F", bound=Callable[..., Any])


def host_options(command: F) -> F:
    """Adds all options to a command, which gets them as keyword arguments named as in `NAMES`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def flat_network_options(command: F) -> F:
    """Adds only ``--hosts`` and ``--bandwidth``: hosts of one rank each behind equal links."""
    for option in reversed(_OPTIONS[:2]):
        command = option(command)
    return command


def check_options(options: Mapping[str, Any]) -> None:
    """Checks before anything runs whether the cluster can be created.

    Args:
        options: The options' values by name; None for those that are not given.

    Raises:
        UsageError: A value is wrong, or an option is missing.
        MissingCapabilityError: This machine or this installation cannot create the cluster.
    """
    if options["hosts"] is None:
        extra = [name for name in NAMES if options[name] is not None]
        if extra:
            raise UsageError(f"--{extra[0].replace('_', '-')} needs --hosts")
        return
    if options["bandwidth"] is None:
        raise UsageError("--hosts and --bandwidth belong together")
    require_extension("hosts", "--hosts").check({name: options[name] for name in NAMES})


def on_hosts(options: Mapping[str, Any], command: Sequence[str]) -> list[str]:
    """The command that runs another one on the hosts; the given command without hosts.

    Args:
        options: The options' values by name.
        command: What to run for each rank, or a torchrun command that starts the ranks.

    Raises:
        UsageError: The command starts ranks in a way that the hosts cannot take over.
    """
    if options["hosts"] is None:
        return list(command)
    command = command_of_each_rank(
        command, hosts=options["hosts"], ranks_per_host=options["ranks_per_host"] or 1
    )
    arguments = [
        argument
        for name in NAMES
        if options[name] is not None
        for argument in (f"--{name.replace('_', '-')}", str(options[name]))
    ]
    launcher = require_extension("hosts", "--hosts").__name__
    return [sys.executable, "-m", launcher, *arguments, "--", *command]
