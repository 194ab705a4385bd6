"""What a reader of a foreign format hands over: a run and one table of events per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from ddltrace.tracer.trace.run_info import RunInfo

MAX_TIME_NS: Final = 1 << 62
"""Beyond this a time is damage; the room above lets times be added without overflow."""


@dataclass
class ImportedTrace:
    """A trace of another tool in this project's terms.

    Attributes:
        run: What is known of the run; `source` names the format.
        tables: Segment name -> its events, a table of schema `EVENTS`.
    """

    run: RunInfo
    tables: dict[str, pa.Table]
