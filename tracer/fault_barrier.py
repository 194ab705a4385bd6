"""Keeps what fails in the tracer from whoever would print it."""

from __future__ import annotations

from collections.abc import Callable


def quiet(
    function: Callable[[], object], fault: Callable[[str, Exception], None]
) -> Callable[[], None]:
    """A function for hooks of the interpreter, which print what is raised in them.

    Args:
        function: What to call.
        fault: Is given the function's name and what it raised.
    """

    def call() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - the process is forking, or on its way out
            fault(function.__name__, error)

    return call
