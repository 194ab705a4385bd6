"""The result of a reader of another tool's format: a run and one table of events per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from ddltrace.tracer.trace.run_info import RunInfo

MAX_TIME_NS: Final = 1 << 62
"""A larger time counts as damage; the limit allows sums of times without overflow."""


@dataclass
class ImportedTrace:
    """A trace of another tool in this project's terms.

    Attributes:
        run: Metadata of the run; `source` names the format.
        tables: Segment name -> its events, a table of schema `EVENTS`.
    """

    run: RunInfo
    tables: dict[str, pa.Table]
