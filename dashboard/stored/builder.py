"""The process that builds the stored timeline or analysis of one trace.

``python -m ddltrace.dashboard.stored.builder timeline|analysis TRACE``
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ddltrace.analyzer.trace.opened_trace import open_trace
from ddltrace.dashboard.stored.stored_trace import (
    ANALYSIS,
    Stored,
    encode_analysis,
    encode_timeline,
)
from ddltrace.tracer.errors import DdltraceError


def main(kind: str, path: str) -> None:
    """Builds one of the two."""
    if kind == ANALYSIS:
        os.nice(5)  # the timeline is shown first
    trace = open_trace(Path(path))
    encode = encode_analysis if kind == ANALYSIS else encode_timeline
    Stored(trace).write(kind, lambda encoder: encode(trace, encoder))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (DdltraceError, OSError) as failure:
        sys.exit(str(failure))
