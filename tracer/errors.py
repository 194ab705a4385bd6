"""The errors that ddltrace reports to its user.

An exception carries the exit status; the command line's entry point applies it. A message is one
line and names the fix if there is one.
"""

from __future__ import annotations


class DdltraceError(Exception):
    """An error that the user can fix: shown as one line, without a traceback."""

    exit_code = 1


class TraceError(DdltraceError):
    """A trace cannot be read: missing, corrupt, or of an unsupported schema version."""


class StoreError(TraceError):
    """A store cannot be reached, or denies access; see `NotStoredError`."""


class NotStoredError(StoreError):
    """A store lacks the object that was asked for."""


class UsageError(DdltraceError):
    """The command line asks for something that is not possible."""

    exit_code = 2


class UnwritableError(UsageError):
    """A directory cannot be created or written to: permissions, a full disk."""


class ThresholdError(DdltraceError):
    """A ``--fail-on`` expression holds: the measured job misses its threshold."""

    exit_code = 3


class MissingCapabilityError(DdltraceError):
    """This machine lacks a package, a privilege or a program."""


class EngineError(TraceError):
    """The cluster that reads and analyzes a trace cannot be reached, or cannot go on."""


def is_store_failure(error: Exception) -> bool:
    """Whether a store did not answer as it should, so that trying again may succeed.

    A reader that goes on without what it cannot read must not go on then: its result would be
    another one the next time.
    """
    return isinstance(error, StoreError) and not isinstance(error, NotStoredError)
