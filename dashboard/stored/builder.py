"""The process that builds stored parts of a timeline, the analysis, or the slack, of one trace.

``python -m ddltrace.dashboard.stored.builder TRACE analysis|slack|PART...``, where a part is
written as ``NAME:RANK-RANK``, with its first and last rank. It prints the number of events that it
has read since the last such line, and ``part NAME`` when a part is complete.
"""

from __future__ import annotations

import os
import sys

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.stored.stored_trace import ANALYSIS, SLACK, Stored
from ddltrace.tracer.errors import DdltraceError


def report(line: str) -> None:
    """Prints a line in one call: several threads read, and `print` writes line ends separately."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(path: str, *wanted: str) -> None:
    """Builds some of them."""
    trace = open_trace(path)
    trace.on_read = lambda count: report(str(count))
    stored = Stored(trace)
    if wanted == (ANALYSIS,):
        os.nice(5)  # the timeline is complete earlier
        stored.write_analysis()
        return
    if wanted == (SLACK,):
        stored.write_slack()
        return
    os.nice(2)  # the server and the browser draw meanwhile
    for part in wanted:
        name, _, ranks = part.rpartition(":")
        first, _, last = ranks.partition("-")
        stored.write_part(name, [r for r in trace.ranks if int(first) <= r <= int(last)])
        report(f"part {name}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (DdltraceError, OSError) as failure:
        sys.exit(str(failure))
