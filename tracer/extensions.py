"""What the packages above register with those below, which cannot import them: by entry point.

`pyproject.toml` lists the modules in the group `ddltrace.extensions`. Each has the functions that
the package below calls.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Final

from ddltrace.tracer.errors import MissingCapabilityError

GROUP: Final = "ddltrace.extensions"


@functools.cache
def extension(name: str) -> ModuleType | None:
    """The module that is registered under a name; None if its package is not installed."""
    # Takes some milliseconds: only what needs an extension looks for one.
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP, name=name):
        try:
            module: ModuleType = entry.load()
        except ModuleNotFoundError as error:
            if f"{entry.module}.".startswith(f"{error.name}."):
                continue
            raise
        return module
    return None


def require_extension(name: str, user: str) -> ModuleType:
    """The module that is registered under a name.

    Args:
        name: As of `extension`.
        user: What needs it, for the message.

    Raises:
        MissingCapabilityError: Its package is not installed.
    """
    module = extension(name)
    if module is None:
        raise MissingCapabilityError(
            f"{user} needs the package ddltrace.experiments, which is not installed or not "
            "registered; install ddltrace again"
        )
    return module
