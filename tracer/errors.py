"""The errors that ddltrace shows to its user.

The exit status travels on the exception; only the command line's entry point turns it
into a process status. A message is one line and names the fix where there is one.
"""

from __future__ import annotations


class DdltraceError(Exception):
    """Something the user can act on: shown as one line, never as a traceback."""

    exit_code = 1


class TraceError(DdltraceError):
    """A trace cannot be read: missing, corrupt, or of another schema version."""


class UsageError(DdltraceError):
    """The command line asks for something that cannot be done."""

    exit_code = 2


class UnwritableError(UsageError):
    """A directory cannot be made or written to, though nothing stands in its way."""


class ThresholdError(DdltraceError):
    """A ``--fail-on`` expression holds: the measured job misses its threshold."""

    exit_code = 3


class MissingCapabilityError(DdltraceError):
    """This machine lacks something: a package, a privilege, a program."""
