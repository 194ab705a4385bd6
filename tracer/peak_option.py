"""The option of the commands that know the peak of the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def peak_option(purpose: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds ``--peak-tflops NUMBER``: the argument `peak_tflops` of a command.

    Args:
        purpose: What it is for: the end of the option's help.
    """
    return click.option(
        "--peak-tflops",
        type=click.FloatRange(min=0, min_open=True),
        metavar="NUMBER",
        help="Peak of each rank's device in 10^12 floating-point operations per second, "
        f"for {purpose}.",
    )
