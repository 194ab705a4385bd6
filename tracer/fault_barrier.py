"""Catches the tracer's errors in interpreter hooks, whose errors Python would print."""

from __future__ import annotations

from collections.abc import Callable


def quiet(
    function: Callable[..., object], fault: Callable[[str, Exception], None]
) -> Callable[..., None]:
    """Wraps a function for use as a hook of the interpreter, which prints exceptions of hooks.

    Args:
        function: The function to call.
        fault: Called with the function's name and the exception.
    """

    def call(*arguments: object) -> None:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - the process is forking, or on its way out
            fault(function.__name__, error)

    return call
