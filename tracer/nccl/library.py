"""Finds the plugin that NCCL loads, and compiles it if the installed package does not contain it.

The plugin needs libc only, so one library fits every Python and PyTorch of a machine. Wheels
contain it if a C compiler was there when they were built. Otherwise, it is compiled into the
user's cache.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Final

from ddltrace.tracer.errors import MissingCapabilityError
from ddltrace.tracer.nccl.compile_plugin import COMPILERS, LIBRARY, compile_plugin, compiler
from ddltrace.tracer.owner_access import is_private, make_private_folder, user_folder

_FOLDER: Final = Path(__file__).parent
_SUBJECT: Final = "NCCL's profiler plugin"


def find() -> Path:
    """The plugin's path; it is compiled if necessary.

    Raises:
        MissingCapabilityError: There is none and it cannot be compiled.
    """
    if sys.platform != "linux":
        raise MissingCapabilityError(f"{_SUBJECT} is for Linux only")
    packaged = _FOLDER / LIBRARY
    if packaged.is_file():
        return packaged
    try:
        return _cached()
    except (OSError, RuntimeError) as error:
        raise MissingCapabilityError(f"{_SUBJECT} is unavailable: {error}") from error


def _cached() -> Path:
    sources = sorted([*_FOLDER.glob("*.[ch]"), _FOLDER / "compile_plugin.py"])
    folder = user_folder()
    stem = folder / f"nccl-{_digest(b''.join(path.read_bytes() for path in sources))}"
    for library in folder.glob(f"{stem.name}-*.so"):
        # Its code will run in the job: it must be complete, and this user's.
        is_ours = is_private(library.stat()) and is_private(folder.stat())
        if is_ours and library.stem.endswith(_digest(library.read_bytes())):
            return library
    with_what = compiler()
    if with_what is None:
        raise MissingCapabilityError(
            f"{_SUBJECT} needs a C compiler once: none of {', '.join(COMPILERS)} "
            "(Debian: apt-get install gcc libc6-dev)"
        )
    make_private_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        made = Path(name) / "made.so"
        if (reason := compile_plugin(with_what, made)) is not None:
            raise MissingCapabilityError(f"{_SUBJECT} does not compile: {reason}")
        library = stem.with_name(f"{stem.name}-{_digest(made.read_bytes())}.so")
        made.chmod(0o700)  # with the umask of many systems, the group may write it
        made.replace(library)
        return library


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]
