"""Compiles the C++ sources in this folder for the installed PyTorch, once.

PyTorch's C++ interface changes between versions, so a library fits only the build of PyTorch that
it was compiled for. It is kept in the user's cache under a name that identifies that build.
Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, TextIO

from ddltrace.tracer.errors import MissingCapabilityError
from ddltrace.tracer.owner_access import is_private, make_private_folder, user_folder

SWITCH: Final = "DDLTRACE_NATIVE"
"""Environment variable; 0 turns the library off."""

_FOLDER: Final = Path(__file__).parent
_SOURCES: Final = sorted(_FOLDER.glob("*.cpp"))
_COMPILERS: Final = ("c++", "g++", "clang++")
_STANDARDS: Final = ("c++20", "c++17")  # newer PyTorch needs the first, older compilers the second
_TIMEOUT_S: Final = 120
_POLL_S: Final = 0.1


def installed() -> Path | None:
    """The library for this interpreter's PyTorch; None if there is none that can be used."""
    try:
        return find()
    except MissingCapabilityError:
        return None


def find() -> Path:
    """The library for this interpreter's PyTorch.

    Raises:
        MissingCapabilityError: It is not built, turned off, or may not be used.
    """
    if os.environ.get(SWITCH) == "0":
        raise MissingCapabilityError(f"{SWITCH}=0")
    try:
        stem = _stem()
        found = list(stem.parent.glob(f"{stem.name}-*.so"))
        for path in found:
            if _is_ours(path) and _is_whole(path):
                return path
        reason = f"{found[0]} is damaged or can be written by others" if found else _unbuilt(stem)
    except (OSError, RuntimeError) as error:
        reason = str(error)
    raise MissingCapabilityError(reason)


def _unbuilt(stem: Path) -> str:
    """Why there is no library."""
    with contextlib.suppress(FileNotFoundError):
        return _complaint(_failure(stem).read_text(encoding="utf-8", errors="replace")[:200])
    return "the C++ library is not compiled" if compiler() else _no_compiler()


def _complaint(text: str) -> str:
    return f"the C++ library does not compile: {text}"


def _no_compiler() -> str:
    return f"no C++ compiler: none of {', '.join(_COMPILERS)}"


def is_wanted() -> bool:
    """Whether to build the library: possible, not done yet, and no earlier attempt failed."""
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux" or compiler() is None:
        return False
    try:
        return installed() is None and not _failure(_stem()).exists()
    except (OSError, RuntimeError, MissingCapabilityError):
        return False


def compiler() -> str | None:
    """The C++ compiler of this machine; None if there is none."""
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def build() -> Path:
    """Compiles the library, or waits for another process that is compiling it.

    Returns:
        Its path.

    Raises:
        MissingCapabilityError: It cannot be compiled here. `is_wanted` is false from then on.
    """
    with_what = compiler()
    if with_what is None:
        raise MissingCapabilityError(_no_compiler())
    try:
        stem = _stem()
        make_private_folder(stem.parent)
        with (stem.parent / "lock").open("w") as lock:
            _wait_for(lock)
            return installed() or _compile(with_what, stem)
    except RuntimeError as error:
        raise MissingCapabilityError(str(error)) from error
    except OSError as error:
        raise MissingCapabilityError(f"{error.filename}: {error.strerror}") from error


def _wait_for(lock: TextIO) -> None:
    """Takes a lock.

    Raises:
        MissingCapabilityError: Another process has it for longer than compiling takes.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                taken = "another process is compiling the C++ library"
                raise MissingCapabilityError(taken) from None
        time.sleep(_POLL_S)


def _compile(with_what: str, stem: Path) -> Path:
    torch = _torch_folder()
    complaint = ""
    with tempfile.TemporaryDirectory(dir=stem.parent) as name:
        made = Path(name) / "made.so"
        for standard in _STANDARDS:
            command = [with_what, "-O2", "-shared", "-fPIC", f"-std={standard}"]
            command += ["-isystem", str(torch / "include"), *_string_abi(torch)]
            command += [*map(str, _SOURCES), "-o", str(made)]
            command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired:
                complaint = f"{with_what} takes more than {_TIMEOUT_S} s"
                break
            if done.returncode == 0:
                library = stem.with_name(f"{stem.name}-{_digest(made.read_bytes())}.so")
                made.chmod(0o700)  # with the umask of many systems, the group may write it
                made.replace(library)
                _failure(stem).unlink(missing_ok=True)
                return library
            complaint = complaint or _first_error(done.stderr)
    with contextlib.suppress(OSError):
        _failure(stem).write_text(complaint, encoding="utf-8")
    raise MissingCapabilityError(_complaint(complaint))


def _first_error(output: str) -> str:
    lines = output.strip().splitlines() or ["the compiler gave no reason"]
    return next((line for line in lines if "error" in line), lines[0])[:200]


def _stem() -> Path:
    """The library's path without its suffix: a hash of the sources and of the PyTorch build.

    Raises:
        MissingCapabilityError: PyTorch is not installed.
        OSError: Its files cannot be read.
        RuntimeError: The user has no home directory.
    """
    torch = _torch_folder()
    version = (torch / "version.py").read_bytes()
    core = (torch / "lib" / "libtorch_cpu.so").stat()
    sources = [path.read_bytes() for path in (*_SOURCES, *sorted(_FOLDER.glob("*.h")))]
    parts = (version, *sources, f"{core.st_size} {core.st_mtime_ns}".encode())
    return user_folder() / f"native-{_digest(b''.join(parts))}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def _failure(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.failed")


def _is_ours(library: Path) -> bool:
    """Whether only this user can have written the file: its code will run in the job."""
    return is_private(library.stat()) and is_private(library.parent.stat())


def _is_whole(library: Path) -> bool:
    """Whether the file is complete: a truncated library can crash the job that loads it."""
    return library.stem.endswith(_digest(library.read_bytes()))


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise MissingCapabilityError("PyTorch is not installed here")
    return Path(found.submodule_search_locations[0])


def _string_abi(torch: Path) -> list[str]:
    """The compiler flag for the string ABI of this PyTorch."""
    flag = "-D_GLIBCXX_USE_CXX11_ABI="
    with contextlib.suppress(OSError):
        settings = (torch / "share/cmake/Torch/TorchConfig.cmake").read_text(encoding="utf-8")
        at = settings.find(flag)
        if at >= 0:
            return [settings[at : at + len(flag) + 1]]
    return []
