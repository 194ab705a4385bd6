"""Opens traces with HTA, whose figures tests compare with ours."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest

REASON = "needs HolisticTraceAnalysis, installed without dependencies"


def require_hta() -> None:
    """Skips the test if HTA is not installed."""
    pytest.importorskip("hta.trace_analysis", reason=REASON)


def open_with_hta(folder: Path) -> Any:
    """HTA's analysis of a folder of Kineto files; skips the test without HTA.

    The files are parsed in this process. By default HTA forks a pool of processes, and a child
    of a process that has threads waits forever if a thread held a lock during the fork.
    """
    require_hta()
    from hta.common.trace import Trace
    from hta.trace_analysis import TraceAnalysis

    logging.getLogger("hta").setLevel(logging.ERROR)
    load = Trace.load_traces
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Trace, "load_traces", functools.partialmethod(load, use_multiprocessing=False)
        )
        return TraceAnalysis(trace_dir=str(folder))
