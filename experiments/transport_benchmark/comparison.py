"""Compares message libraries: each runs in a job of its own, on the same network."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ddltrace.experiments.harness.job_process import last_lines, ranks_launcher, run_job
from ddltrace.experiments.transports.protocols import ENVIRONMENT, read_protocol

OPERATIONS: Final = {
    "ping_pong": "rank 0 sends to rank 1, which sends the same back: half of the time of both",
    "push_pull": "all other ranks send to rank 0, which adds and sends the sum back to each",
    "all_reduce": "a ring of sends and receives, the same for every library",
}
"""Operation -> description of one round."""


@dataclass(frozen=True)
class Settings:
    """Settings of one comparison.

    Attributes:
        transports: Names of the transports.
        ranks: Processes.
        sizes: Message sizes in bytes, ascending.
        rounds: Timed rounds of each size at most; large sizes get fewer.
        hosts: Hosts of an emulated network with one rank each; None for this machine's own.
        bandwidth: Rate of each host's link, such as ``400mbit``.
        timeout_s: Seconds after which a transport is ended and reported as hung.
        protocols: Protocols whose profiles pace the transport ``tcp``, each in a row of its own.
    """

    transports: tuple[str, ...]
    ranks: int
    sizes: tuple[int, ...]
    rounds: int
    hosts: int | None
    bandwidth: str | None
    timeout_s: float
    protocols: tuple[str, ...] = ()


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """Powers of four from 4 bytes on, with `largest` as the last."""
    sizes = [4]
    while sizes[-1] * 4 < largest:
        sizes.append(sizes[-1] * 4)
    return (*sizes, largest) if largest > sizes[-1] else tuple(sizes)


SCHEMA: Final = "ddltrace.transports/1"
_PACED: Final = "tcp"
"""The transport that profiles pace."""


@dataclass(frozen=True)
class Point:
    """One operation at one size.

    Attributes:
        operation: ``ping_pong``, ``push_pull`` or ``all_reduce``.
        bytes: Size of the message; of the whole vector for an all_reduce.
        us: Median time of one round (us).
        cpu_us: Processor time of one round, over all ranks (us).
        rounds: Timed rounds.
    """

    operation: str
    bytes: int
    us: float
    cpu_us: float
    rounds: int

    @property
    def one_way_us(self) -> float:
        """Time of one message in a ping-pong, else of the round (us)."""
        return self.us / 2 if self.operation == "ping_pong" else self.us

    @property
    def gbit_s(self) -> float:
        """Bytes of the message over its time (Gbit/s)."""
        return self.bytes * 8e-3 / self.one_way_us

    @property
    def cpu_ns_per_byte(self) -> float:
        """Processor time of all ranks for one byte of the message (ns)."""
        return self.cpu_us * 1e3 / self.bytes


@dataclass(frozen=True)
class Fit:
    """Time against size as ``latency_us + bytes / bandwidth``.

    Weighted least squares with relative errors, over all sizes.

    Attributes:
        latency_us: Time of an empty message (us).
        gbit_s: Bandwidth (Gbit/s); None if larger messages take no longer.
    """

    latency_us: float
    gbit_s: float | None


@dataclass(frozen=True)
class TransportResult:
    """Results of one transport.

    Attributes:
        transport: Its name.
        status: ``complete``, ``unavailable`` or ``failed``.
        reason: Reason for a status other than complete.
        points: One for each operation and size.
        protocol: Protocol of ``--protocol``; None for the transport as it is.
        profile: The protocol's numbers and sources; None without one.
        planned: Of rank 0: ``messages`` that the profile paced, their ``planned_us`` and
            ``taken_us`` in all, and how many were ``late``; None without a paced protocol.
    """

    transport: str
    status: str
    reason: str
    points: tuple[Point, ...] = ()
    protocol: str | None = None
    profile: dict[str, Any] | None = None
    planned: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """Its name in tables and plots."""
        if self.protocol is None:
            return self.transport
        kind = "paced, profile" if read_protocol(self.protocol).is_paced else "protocol"
        return f"{self.transport} ({kind} {self.protocol})"

    def of(self, operation: str) -> list[Point]:
        """The points of one operation, by size."""
        return [point for point in self.points if point.operation == operation]

    def fit(self, operation: str) -> Fit | None:
        """Latency and bandwidth of one operation; None with fewer than two sizes."""
        points = self.of(operation)
        if len({point.bytes for point in points}) < 2:
            return None
        times = np.array([point.one_way_us for point in points])
        sizes = np.array([point.bytes for point in points], dtype=float)
        # Each row divided by its time: relative errors count alike at all sizes.
        rows = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
        (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)
        return Fit(max(0.0, float(latency)), 8e-3 / float(per_byte) if per_byte > 0 else None)


@dataclass(frozen=True)
class Comparison:
    """Results of a comparison.

    Attributes:
        settings: Settings of the comparison.
        results: One for each transport.
    """

    settings: Settings
    results: tuple[TransportResult, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON of schema `SCHEMA`."""
        rows = []
        for result in self.results:
            operations = sorted({point.operation for point in result.points})
            fits = {name: fit for name in operations if (fit := result.fit(name)) is not None}
            rows.append(
                {**asdict(result), "fits": {name: asdict(fit) for name, fit in fits.items()}}
            )
        return {"schema": SCHEMA, "settings": asdict(self.settings), "transports": rows}


def compare(settings: Settings, tell: Callable[[str], None]) -> Comparison:
    """Measures each transport in a separate job, one after the other.

    Args:
        settings: Settings of the comparison.
        tell: Called with the name of each transport before it starts.
    """
    results = []
    with tempfile.TemporaryDirectory(prefix="ddltrace-transports-") as folder:
        for name in settings.transports:
            tell(name)
            results.append(_run(name, settings, Path(folder)))
        for protocol in settings.protocols:
            tell(f"{_PACED}, protocol {protocol}")
            result = _run(_PACED, settings, Path(folder), protocol)
            profile = read_protocol(protocol).to_json()
            results.append(replace(result, protocol=protocol, profile=profile))
    return Comparison(settings, tuple(results))


def _run(
    name: str, settings: Settings, folder: Path, protocol: str | None = None
) -> TransportResult:
    file = name if protocol is None else f"{name}-{protocol}"
    output, log = folder / f"{file}.json", folder / f"{file}.log"
    end = run_job(
        _command(name, settings, output),
        log,
        timeout_s=settings.timeout_s,
        environment={} if protocol is None else {ENVIRONMENT: protocol},
    )
    if end.timed_out:
        return TransportResult(name, "failed", f"did not end within {settings.timeout_s:g} s")
    found: Any = json.loads(output.read_text(encoding="utf-8")) if output.exists() else None
    if isinstance(found, dict) and "error" in found:
        return TransportResult(name, "unavailable", str(found["error"]))
    if end.status != 0 or found is None:
        reason = f"exit status {end.status}: {last_lines(log)}"
        return TransportResult(name, "failed", reason)
    points = tuple(Point(**point) for point in found["points"])
    return TransportResult(name, "complete", "", points, planned=found["planned"])


def _command(name: str, settings: Settings, output: Path) -> list[str]:
    worker = [
        "ddltrace.experiments.transport_benchmark.rank",
        *("--transport", name, "--sizes", ",".join(map(str, settings.sizes))),
        *("--rounds", str(settings.rounds), "--output", str(output)),
    ]
    return [*ranks_launcher(settings.ranks, settings.hosts, settings.bandwidth), "-m", *worker]
