"""Access to files whatever the umask: the owner's own, and the user's private folder.

A umask can give a group write access (002, the default of users on Debian and Red Hat), or take
the owner's access away.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

_OWNER_OF_FILE: Final = stat.S_IRUSR | stat.S_IWUSR
_PRIVATE: Final = 0o700


def user_folder() -> Path:
    """The folder of ddltrace in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddltrace"


def make_private_folder(folder: Path) -> None:
    """Creates a folder in the user's cache to which only this user has access.

    A folder of this user that others can write to is made private as well.

    Raises:
        OSError: It cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
    status = folder.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != _PRIVATE:
        folder.chmod(_PRIVATE)


def is_private(status: os.stat_result) -> bool:
    """Whether no other user (but root) can have written to a file or folder."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def let_owner_use(file: int | Path) -> None:
    """Gives the owner access to a new file or folder if the umask has taken it away.

    Args:
        file: A path, or the descriptor of a file.

    Raises:
        OSError: The file system refuses.
    """
    mode = os.stat(file).st_mode
    wanted = mode | (_PRIVATE if stat.S_ISDIR(mode) else _OWNER_OF_FILE)
    if wanted != mode:
        os.chmod(file, stat.S_IMODE(wanted))
