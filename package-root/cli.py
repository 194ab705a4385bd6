"""The command line: a click group that imports a command's package when it is called."""

from __future__ import annotations

import contextlib
import importlib
import keyword
import os
import sys
from typing import Final

import click

from ddltrace import __version__
from ddltrace.tracer.errors import DdltraceError
from ddltrace.tracer.storage.store_threads import is_any_left

# Command -> (its module, its line in `--help`). The lines are kept here so that `ddltrace --help`
# imports none of the modules.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "run": ("ddltrace.tracer.commands", "Run a training job and record its trace."),
    "on": ("ddltrace.tracer.switch_commands", "Record a running job from now on."),
    "off": ("ddltrace.tracer.switch_commands", "Stop recording a running job."),
    "level": ("ddltrace.tracer.switch_commands", "Change the level of detail of a running job."),
    "watch": ("ddltrace.analyzer.watch_commands", "Serve metrics of a running job, and alert."),
    "attach": (
        "ddltrace.tracer.switch_commands",
        "Arm a running job that was started without ddltrace.",
    ),
    "merge": ("ddltrace.tracer.commands", "Merge the traces of one job's launchers."),
    "collect": ("ddltrace.tracer.gather_commands", "Gather the traces of a job's nodes."),
    "upload": ("ddltrace.tracer.gather_commands", "Upload a trace to a store."),
    "doctor": ("ddltrace.tracer.commands", "Check what can be recorded on this machine."),
    "analyze": ("ddltrace.analyzer.commands", "Report where the time of a trace goes."),
    "compare": ("ddltrace.analyzer.commands", "Compare two traces."),
    "query": ("ddltrace.analyzer.commands", "Run SQL over a trace."),
    "whatif": (
        "ddltrace.analyzer.whatif_commands",
        "Predict a step with another network, strategy or number of ranks.",
    ),
    "dashboard": ("ddltrace.dashboard.commands", "Show traces in the browser."),
    "import": ("ddltrace.analyzer.exchange_commands", "Convert another tool's trace."),
    "export": ("ddltrace.analyzer.exchange_commands", "Convert a trace for other tools."),
    "experiment": (
        "ddltrace.experiments.commands",
        "Compare communication strategies in real training.",
    ),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, in the order in which a user needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the module of a command."""
        if cmd_name not in COMMANDS:
            return None
        module_name, _ = COMMANDS[cmd_name]
        # The function of the command `import`, a keyword, is called `import_`.
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        command = getattr(importlib.import_module(module_name), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: ddltrace run -- torchrun --nproc-per-node 2 train.py",
)
@click.version_option(__version__, prog_name="ddltrace")
def cli() -> None:
    """See where a distributed PyTorch job spends its time."""


def main() -> None:
    """Entry point of the console script: reports an error as one line and an exit status."""
    try:
        status = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("ddltrace: interrupted", err=True)
        status = 130
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except DdltraceError as error:
        click.echo(f"ddltrace: {error}", err=True)
        status = error.exit_code
    except KeyboardInterrupt:
        click.echo("ddltrace: interrupted", err=True)
        status = 130
    except BrokenPipeError:
        # The reader closed the pipe (`ddltrace analyze ... | head`). This is not an error, but
        # Python would report one when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except Exception as error:
        # A bug: one line for the user, the traceback on demand.
        if os.environ.get("DDLTRACE_DEBUG"):
            raise
        kind = type(error).__name__
        click.echo(
            f"ddltrace: internal error, please report it: {kind}: {str(error)[:200]!r} "
            "(DDLTRACE_DEBUG=1 shows where)",
            err=True,
        )
        status = 1
    status = status if isinstance(status, int) else 0
    if is_any_left():
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)  # without waiting for a store that does not answer
    sys.exit(status)
