"""The code of an analysis that runs in the workers of a Dask cluster.

Tasks and results are pickled here and not by Dask: the columns of a result can then be written to,
as in this process, and neither the scheduler nor the client decodes a result before its turn.
"""

from __future__ import annotations

import hashlib
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from ddltrace.tracer.errors import UsageError

_PACKAGE: Final = __name__.partition(".")[0]
_SHOWN: Final = 8


@cache
def code_version() -> str:
    """The version of ddltrace, with a digest of its code: results must come from equal code."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for source in sorted(root.rglob("*.py")):
        digest.update(source.read_bytes())
    return f"{vars(sys.modules[_PACKAGE])['__version__']} (code {digest.hexdigest()[:_SHOWN]})"


def pack(task: Callable[[Any], Any], items: Sequence[Any]) -> tuple[str, bytes]:
    """A task with some arguments, as `execute` takes it."""
    return code_version(), pickle.dumps((task, items), protocol=pickle.HIGHEST_PROTOCOL)


def execute(work: tuple[str, bytes]) -> bytes:
    """Executes a task for each of its arguments; the list of the results is pickled."""
    task, items = _unpacked(work)
    return _packed([task(item) for item in items])


def dask_setup(worker: Any) -> None:
    """Called by a worker of a local cluster when it starts: Ctrl-C is for the client to handle."""
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _unpacked(work: tuple[str, bytes]) -> tuple[Callable[[Any], Any], Sequence[Any]]:
    version, content = work
    if version != code_version():
        raise UsageError(
            f"a Dask worker has ddltrace {code_version()}, this command {version}: install the "
            "same version on all workers"
        )
    task, items = pickle.loads(content)
    return task, items


def _packed(result: Any) -> bytes:
    content = pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
    # Otherwise Arrow keeps the memory of the events, beside that of the next task.
    pa.default_memory_pool().release_unused()
    return content
