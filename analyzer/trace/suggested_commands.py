"""The commands that reports and errors suggest for the directories of a trace."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.trace.trace_files import RUN_FILE


def collect_command(paths: Sequence[Location]) -> str:
    """Returns the command that gathers several directories of one job into one trace."""
    named = " ".join(shlex.quote(str(path)) for path in paths)
    return f"ddltrace collect {named} -o whole"


def dashboard_command(paths: Sequence[Location]) -> str:
    """Returns the command that shows the trace in the browser; merges several directories."""
    named = " ".join(shlex.quote(str(path)) for path in paths)
    if len(paths) == 1:
        return f"ddltrace dashboard {named}"
    gather = "merge" if all((path / RUN_FILE).is_file() for path in paths) else "import"
    return f"ddltrace {gather} {named} -o whole && ddltrace dashboard whole"
