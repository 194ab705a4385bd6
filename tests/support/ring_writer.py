"""Writes rings of NCCL's events with chosen times, as the plugin would."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ddltrace.analyzer.nccl import ring_file
from ddltrace.tracer.nccl.event_kinds import KINDS

_RECORDS_AT = ring_file._NAMES_AT + 256 * 32 + 1024 * 112


@dataclass
class RingWriter:
    """A ring in memory.

    Attributes:
        rank: Rank of the process in the job.
        pid: The process.
        host: Its host.
        capacity: Number of records.
        records: The events, by their numbers.
        comms: The communicators.
        names: The names.
    """

    rank: int
    pid: int
    host: str = "host"
    capacity: int = 64
    records: list[dict[str, Any]] = field(default_factory=list)
    comms: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    names: list[str] = field(default_factory=lambda: [""])
    overrides: dict[str, Any] = field(default_factory=dict)

    def comm(self, number: int, rank: int, ranks: int, nodes: int = 1) -> int:
        """Adds a communicator; returns its place."""
        self.comms.append(
            {"id": number, "rank": rank, "ranks": ranks, "nodes": nodes, "interface": 5}
        )
        return len(self.comms) - 1

    def name(self, text: str) -> int:
        """The number of a name."""
        if text not in self.names:
            self.names.append(text)
        return self.names.index(text)

    def add(self, kind: str, start: int, stop: int | None, **values: Any) -> int:
        """Adds an event; returns its number. Names are given as text."""
        number = len(self.records) + 1
        pending = (1 << 63) | number
        for key in ("func", "datatype", "algo", "proto", "variant"):
            if key in values:
                values[key] = self.name(values[key])
        states = values.pop("states", (None, None, None))
        record = {
            "stamp": 2 * number,
            "start_ns": start,
            "stop_ns": pending if stop is None else stop,
            "value": pending,
            "state_ns": [pending if each is None else each for each in states],
            "kind": KINDS.index(kind),
            "device": -1,
            **values,
        }
        self.records.append(record)
        return number

    def coll(self, comm: int, start: int, stop: int, seq: int, count: int, **values: Any) -> int:
        """Adds an all-reduce of 32-bit floats with the algorithm RING and the protocol SIMPLE."""
        known = {"func": "AllReduce", "datatype": "ncclFloat32", "algo": "RING", "proto": "SIMPLE"}
        more = {"comm": comm, "sequence": seq, "count": count, "channel": 1}
        return self.add("coll", start, stop, **{**known, **more, **values})

    def bytes(self) -> bytes:
        """The file."""
        content = np.zeros(_RECORDS_AT + self.capacity * ring_file._RECORD.itemsize, np.uint8)
        header = content[: ring_file._HEADER.itemsize].view(ring_file._HEADER)
        known = {
            **{"magic": ring_file.MAGIC, "version": 1, "capacity": self.capacity},
            **{"record_bytes": ring_file._RECORD.itemsize, "rank": self.rank, "pid": self.pid},
            **{"records_at": _RECORDS_AT, "host": self.host.encode(), "boot_id": b"boot"},
            **{"opened_ns": 1, "opened_unix_ns": 1, "claimed": len(self.records)},
        }
        for key, value in {**known, **self.overrides}.items():
            header[key] = value
        names_at = ring_file._NAMES_AT
        names = content[names_at : names_at + 256 * 32].view(ring_file._NAME)
        for place, text in enumerate(self.names[1:], 1):
            names[place] = (2, text.encode())
        comms = content[names_at + 256 * 32 : _RECORDS_AT].view(ring_file._COMM)
        for place, values in enumerate(self.comms):
            for key, value in values.items():
                comms[place][key] = value
        records = content[_RECORDS_AT:].view(ring_file._RECORD)
        for number, values in enumerate(self.records, 1):
            for key, value in values.items():
                records[(number - 1) % self.capacity][key] = value
        return content.tobytes()

    def write(self, folder: Path) -> Path:
        """Writes the file into a folder."""
        path = folder / f"nccl-{self.rank}-{self.pid}.ring"
        path.write_bytes(self.bytes())
        return path
