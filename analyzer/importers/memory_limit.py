"""Limits the memory of the import of a file.

The limit is linear in the file: ten times its decompressed size, at least 256 MB. Readers
estimate what they need from what they have read so far, and stop before they need more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ddltrace.analyzer.formatting.quantities import parse_memory_limit
from ddltrace.tracer.environment import environment_variable
from ddltrace.tracer.errors import TraceError

ENVIRONMENT: Final = "DDLTRACE_IMPORT_MEMORY"
"""Environment variable with another limit, such as ``8GB``. Helper processes inherit it."""

TIMES: Final = 10
LEAST_BYTES: Final = 256_000_000


def memory_limit(content_bytes: int) -> int:
    """The memory that a file of `content_bytes` (decompressed) may take, in bytes.

    Raises:
        UsageError: The environment variable holds no size.
    """
    text = os.environ.get(ENVIRONMENT)
    return parse_memory_limit(text) if text else max(LEAST_BYTES, TIMES * content_bytes)


def check_memory(path: Path, needed_bytes: int, content_bytes: int) -> None:
    """Checks that a file may take the memory that it needs.

    Args:
        path: The file.
        needed_bytes: An estimate for what has been read so far.
        content_bytes: Its decompressed size so far.

    Raises:
        TraceError: It needs more than its limit; the message names the limit.
        UsageError: The environment variable holds no size.
    """
    limit = memory_limit(content_bytes)
    if needed_bytes > limit:
        rule = (
            f"set by {ENVIRONMENT}"
            if os.environ.get(ENVIRONMENT)
            else f"{TIMES} times its content, at least {LEAST_BYTES // 1_000_000} MB"
        )
        content, needed, allowed = (
            f"{size / 1e6:.0f} MB" for size in (content_bytes, needed_bytes, limit)
        )
        raise TraceError(
            f"{path}: {content} of content need at least {needed} of memory, more than the limit "
            f"of {allowed} ({rule}): raise it with --memory-limit of ddltrace import, or with "
            f"{ENVIRONMENT}=SIZE"
        )


@contextmanager
def limited_to(size: str | None) -> Iterator[None]:
    """Sets another limit for a `with` block, here and in processes that are started in it.

    Raises:
        UsageError: It is not a size.
    """
    if size is None:
        memory_limit(0)  # a wrong size in the environment is an error before any work
        yield
        return
    parse_memory_limit(size)
    with environment_variable(ENVIRONMENT, size):
        yield
