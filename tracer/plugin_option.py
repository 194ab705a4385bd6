"""The option of the commands that load techniques of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

_HELP: Final = (
    "A Python file that registers techniques of your own for --strategy; repeat it. "
    "See docs/experiment-guide.md."
)


def plugin_option(text: str = _HELP) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds ``--plugin FILE``, which may be repeated: the argument `plugins` of a command.

    Args:
        text: Help of the option.
    """
    return click.option(
        "--plugin",
        "plugins",
        multiple=True,
        type=click.Path(path_type=str),
        metavar="FILE",
        help=text,
    )
