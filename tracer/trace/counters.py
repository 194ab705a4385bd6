"""Resource counters: their names, units and meanings, and the columns of their files.

A file has one row per counter and sample. A counter that cannot be read on a machine has no rows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.trace.arrow_arrays import floats, integer_columns, integers, strings
from ddltrace.tracer.trace.event_reader import ArrowReader, read_table
from ddltrace.tracer.trace.schema import SCHEMA_NAME
from ddltrace.tracer.trace.trace_files import counters_path


class Counter(NamedTuple):
    """One counter.

    Attributes:
        name: Its name in the files.
        unit: Unit of its values.
        meaning: What is counted.
        cumulative: Whether values only grow, so that the difference of two values is the amount
            in between.
    """

    name: str
    unit: str
    meaning: str
    cumulative: bool = False


RESOURCE_COUNTERS: Final = (
    Counter("process_cpu", "cores", "processor time of the rank's process per second"),
    Counter(
        "process_cpu_time",
        "s",
        "processor time of all threads of the rank's process since its start, at ends of steps",
        True,
    ),
    Counter("process_memory", "bytes", "resident memory of the rank's process"),
    Counter(
        "process_cpu_wait",
        "share",
        "share of time in which the process's main thread was runnable but had no processor",
    ),
    Counter("host_cpu", "share", "busy share of all processors of the host"),
    Counter("host_processors", "processors", "processors of the host that are online"),
    Counter("host_memory_used", "bytes", "memory of the host that is not available"),
    Counter("host_memory_total", "bytes", "memory of the host"),
    Counter("network_sent", "bytes", "bytes sent on an interface since its start", True),
    Counter("network_received", "bytes", "bytes received on an interface since its start", True),
    Counter("device_utilization", "share", "share of time in which a kernel ran on the device"),
    Counter("device_memory_used", "bytes", "memory of the device in use by all processes"),
    Counter("device_memory_total", "bytes", "memory of the device"),
    Counter("device_power", "W", "power draw of the device"),
    Counter("device_temperature", "°C", "temperature of the device"),
    Counter("device_sm_clock", "MHz", "clock of the device's multiprocessors"),
    Counter("device_memory_clock", "MHz", "clock of the device's memory"),
    Counter("device_throttling", "bits", "NVML's reasons for a reduced clock, as a bit mask"),
    Counter("device_allocated_peak", "bytes", "peak of PyTorch's allocated memory in one step"),
    Counter("device_reserved_peak", "bytes", "peak of PyTorch's reserved memory in one step"),
)
"""Those of a host, an interface or a device are recorded by each rank that reads them: of the host
by the lowest local rank, of a device by the ranks that use it."""

CONNECTION_COUNTERS: Final = (
    Counter("connection_sent", "bytes", "bytes sent on a TCP connection that have arrived", True),
    Counter(
        "connection_busy",
        "s",
        "time in which a TCP connection had bytes to send, and its peer room for them",
        True,
    ),
    Counter("connection_retransmits", "segments", "segments sent again on a TCP connection", True),
)
"""Those of the connections of a rank's process that have carried a mebibyte."""

COUNTER_LIST: Final = (*RESOURCE_COUNTERS, *CONNECTION_COUNTERS)

COUNTERS: Final = pa.schema(
    [
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("name", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("instance", pa.dictionary(pa.int16(), pa.string())),
        pa.field("step", pa.int32()),
        pa.field("value", pa.float64(), nullable=False),
    ],
    metadata={b"ddltrace.schema": SCHEMA_NAME.encode()},
)
"""The columns of a counter file, in order."""

_CODE_OF_NAME: Final = {counter.name: code for code, counter in enumerate(COUNTER_LIST)}


class Reading(NamedTuple):
    """One value of one counter.

    Attributes:
        name: The counter, one of `COUNTER_LIST`.
        value: Its value.
        instance: The interface, device or connection; None for counters of a process or host.
    """

    name: str
    value: float
    instance: str | None = None


class CounterRows:
    """Makes the Arrow batches of one counter file."""

    def __init__(self) -> None:
        self._instances: dict[str, int] = {}
        self._names = strings([counter.name for counter in COUNTER_LIST])

    def batch(self, rows: list[tuple[int, int | None, Reading]]) -> pa.RecordBatch:
        """A batch of schema `COUNTERS`.

        Args:
            rows: Time in ns, step, and reading of each row.
        """
        codes = [_CODE_OF_NAME[reading.name] for _, _, reading in rows]
        instances = [
            -1
            if reading.instance is None
            else self._instances.setdefault(reading.instance, len(self._instances))
            for _, _, reading in rows
        ]
        steps = [-1 if step is None else step for _, step, _ in rows]
        columns = [
            integers(np.array([time_ns for time_ns, _, _ in rows])),
            pa.DictionaryArray.from_arrays(integers(np.array(codes), kind=pa.int8()), self._names),
            pa.DictionaryArray.from_arrays(
                _non_negative(instances, pa.int16()), strings(list(self._instances))
            ),
            _non_negative(steps, pa.int32()),
            floats(np.array([reading.value for _, _, reading in rows])),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=COUNTERS)


def _non_negative(values: list[int], kind: pa.DataType) -> pa.Array:
    """A column of integers in which a negative value stands for null."""
    return integer_columns(np.array([values]), [kind])[0]


def read_counters(directory: Location, segment: str) -> tuple[pa.Table, int]:
    """Reads the counters of one rank process, as much as can be read.

    Args:
        directory: The trace directory.
        segment: Base name of the process's event file.

    Returns:
        A table of schema `COUNTERS`, without rows if the process recorded no counters; and how
        many bytes at the end of the file could not be read.

    Raises:
        TraceError: The file is of another schema or cannot be opened.
    """
    path = counters_path(directory, segment)
    if not path.exists():
        # Not `empty_table`, which makes arrays of lists: PyArrow imports pandas for the first one.
        return pa.Table.from_batches([], COUNTERS), 0
    table, lost_bytes = read_table(ArrowReader(path, COUNTERS), COUNTERS)
    return table.combine_chunks(), lost_bytes
