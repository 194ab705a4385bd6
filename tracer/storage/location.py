"""A path on this machine or a location in a store, as users name them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar
from urllib.parse import unquote

if TYPE_CHECKING:
    from ddltrace.tracer.storage.remote_path import RemotePath

Location: TypeAlias = "Path | RemotePath"
"""What readers of traces take."""
Place = TypeVar("Place", Path, "RemotePath", Location)
"""For functions that return locations of the kind that they take."""

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

PART_PREFIX: Final = "part-"
"""Prefix of directories in a trace that several launchers of one job wrote; see `trace_parts`."""


def location_of(text: str | os.PathLike[str] | RemotePath) -> Location:
    """Reads the name of a file or directory; also the type of such an argument of a command.

    Args:
        text: A path, or a URL such as ``s3://bucket/run``. ``file://`` gives a local path.

    Raises:
        UsageError: The URL holds credentials or unknown parameters.
    """
    if not isinstance(text, (str, os.PathLike)):
        return text
    name = os.fspath(text)
    if not _URL.match(name):
        path = text if isinstance(text, Path) else Path(name)
        # In a trace, a link in place of a part is not followed; the user may name one.
        is_chosen_link = path.name.startswith(PART_PREFIX) and path.is_symlink()
        return path.resolve() if is_chosen_link else path
    # Imports pyarrow's file systems, which local traces do not need.
    from ddltrace.tracer.storage.remote_path import RemotePath

    remote = RemotePath(name)
    if remote.url.scheme == "file":
        return Path(unquote("/" + remote.url.place.partition("/")[2]))
    return remote


def matches(directory: Place, pattern: str) -> list[Place]:
    """The files and directories below a directory that match a pattern, sorted.

    Raises:
        StoreError: The store cannot be asked.
    """
    found: list[Place] = [*directory.glob(pattern)]
    return sorted(found, key=str)
