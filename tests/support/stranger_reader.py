"""A reader of traces that was written from `docs/trace-format.md` and `docs/report-reference.md`.

It uses pyarrow and the standard library, and nothing of ddltrace. Functions are called as the terms
of the second page; times are integers in nanoseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pyarrow as pa

CLOCKS = ("device", "gloo", "wait", "thread", "polling", "host", "kernel", "graph")

Row = dict[str, Any]
Spans = list[tuple[int, int]]


def union(spans: Iterable[tuple[int, int]]) -> Spans:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def both(one: Spans, other: Spans) -> Spans:
    found = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(spans: Spans, removed: Spans) -> Spans:
    if not spans:
        return []
    gaps, at = [], spans[0][0]
    for start, end in [*removed, (spans[-1][1], spans[-1][1])]:
        gaps.append((at, start))
        at = max(at, end)
    return both(spans, union(gaps))


def length(spans: Spans) -> int:
    return sum(end - start for start, end in spans)


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class Rank:
    """The rows of one rank, and the instants of the page's table."""

    def __init__(self, number: int, rows: list[Row], groups: dict[str, Any], device: str) -> None:
        self.number = number
        self.rows = rows
        self.groups = groups
        self.on_host = device == "cpu"
        self.messages = self.of("message")
        on_stream = [m for m in self.messages if (m["lane"] or "").startswith("stream")]
        self.in_flight = [m for m in on_stream or self.messages if m["end_ns"] is not None]
        self.waits = [self._wait(row) for row in self.of("wait")]
        self.blocked = union((start, end) for _, start, end in self.waits)
        self.communication = union((m["start_ns"], m["end_ns"]) for m in self.in_flight)
        self.copies = self.spans(self.of("copy"))
        self.data = self.spans(self.of("data"))
        self.update = self.spans(self.phases("optimizer"))
        self.is_device = bool(self.of("kernel"))
        self.compute = self._compute()
        self.device_work = union([*self.compute, *self.communication, *self.copies])
        self.steps = {
            row["step"]: (row["start_ns"], row["end_ns"])
            for row in self.of("step")
            if row["step"] is not None and (row["end_ns"] or 0) > row["start_ns"]
        }

    def of(self, *kinds: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] in kinds]

    def phases(self, *names: str) -> list[Row]:
        return [row for row in self.of("phase") if row["name"] in names]

    def spans(self, rows: list[Row]) -> Spans:
        return union((r["start_ns"], r["end_ns"]) for r in rows if r["end_ns"] is not None)

    def _wait(self, row: Row) -> tuple[str, int, int]:
        start, end = row["start_ns"], row["end_ns"]
        if row["name"] == "backward" and row["parent"] is None:
            phases = [p["start_ns"] for p in self.phases("backward") if p["start_ns"] <= start]
            begin = max(phases, default=start)
            its = [m for m in self.messages if begin <= (m["enqueue_ns"] or m["start_ns"]) <= end]
            if not its:
                end = start
            elif all(m["end_ns"] is not None for m in its):
                end = min(max(start, *(m["end_ns"] for m in its)), end)
        return row["lane"], start, end

    def _compute(self) -> Spans:
        if self.is_device:
            return self.spans(self.of("kernel"))
        rows = [*self.phases("forward", "backward", "optimizer"), *self.of("layer", "codec")]
        parts: Spans = []
        for lane in {row["lane"] for row in rows}:
            blocked = union((start, end) for its, start, end in self.waits if its == lane)
            parts += without(self.spans([r for r in rows if r["lane"] == lane]), blocked)
        return union(parts)


class Collective:
    """The messages of one collective, by arrival."""

    def __init__(self, messages: list[tuple[Rank, Row]], group: dict[str, Any]) -> None:
        self.messages = sorted(messages, key=lambda each: each[1]["start_ns"])
        self.group = group
        rows = [row for _, row in self.messages]
        self.op = rows[0]["op"]
        self.bytes = max((r["bytes"] for r in rows if r["bytes"] is not None), default=None)
        self.step = rows[-1]["step"]
        self.arrivals = [row["start_ns"] for row in rows]
        ranks = [rank.number for rank, _ in messages]
        differ = self.op in ("all_reduce", "reduce", "reduce_scatter")
        if (
            len({row["op"] for row in rows}) > 1
            or len(set(ranks)) < len(ranks)
            or (differ and len({row["bytes"] for row in rows}) > 1)
        ):
            self.state = "mismatched"
        elif set(ranks) != set(group["ranks"]):
            self.state = "partial"
        else:
            is_open = any(row["status"] == "open" for row in rows)
            self.state = "open" if is_open else "complete"
        ends = [row["end_ns"] for row in rows]
        self.end = None if None in ends else max(ends)
        self.timed = self.state == "complete" and self.end is not None
        outputs = [row["out_bytes"] for row in rows if row["out_bytes"] is not None]
        self.size = self.bytes
        if self.op in ("all_gather", "gather"):
            whole = None if self.bytes is None else self.bytes * len(group["ranks"])
            self.size = max(outputs, default=whole)

    @property
    def transfer(self) -> int:
        assert self.end is not None
        return max(self.end - self.arrivals[-1], 0)

    def needed(self, rank: Rank, row: Row) -> list[Row]:
        """The messages that a message needs."""
        others = {its.number: each for its, each in self.messages}
        members, root = list(self.group["ranks"]), row["peer"]
        of_gloo = self.op in ("broadcast", "scatter", "gather") and self.group["backend"] == "gloo"
        if of_gloo and root is not None:
            count = len(members)
            first = members.index(root)
            place = (members.index(rank.number) - first) % count

            def parent(member: int) -> int:
                return member - (1 << (member.bit_length() - 1))

            if self.op == "broadcast":
                links = {child for child in range(1, count) if parent(child) == place}
                while place:
                    place = parent(place)
                    links.add(place)
            else:
                links = {0} if place else set(range(1, count))
            rows = [others[members[(link + first) % count]] for link in links]
            return _started(rows, row["end_ns"])
        left = row["end_ns"] is not None and row["end_ns"] < self.arrivals[-1]
        if left and self.op in ("broadcast", "scatter", "reduce", "gather"):
            fed = self.op in ("broadcast", "scatter") and root in others
            return _started([others[root]] if fed else [], row["end_ns"])
        return [each for _, each in self.messages]


class Trace:
    """A trace directory."""

    def __init__(self, path: Path) -> None:
        self.run = json.loads((path / "run.json").read_text())
        segments: dict[int, list[Any]] = defaultdict(list)
        for info in self.run["ranks"]:
            segments[info["rank"]].append(info)
        self.ranks = {}
        for number, infos in sorted(segments.items()):
            rows = [row for info in infos for row in _rows(path, info["segment"])]
            groups = {group["name"]: group for group in infos[-1]["groups"]}
            self.ranks[number] = Rank(number, rows, groups, infos[-1]["device"] or "cpu")
        self.collectives = self._collectives()
        self.pairs = self._pairs()
        self.numbers = sorted({step for rank in self.ranks.values() for step in rank.steps})
        self.releases = self._releases()

    def _messages(self) -> list[tuple[Rank, Row]]:
        return [(rank, row) for rank in self.ranks.values() for row in rank.messages]

    def _collectives(self) -> list[Collective]:
        found: dict[Any, list[tuple[Rank, Row]]] = defaultdict(list)
        groups = {}
        for rank, row in self._messages():
            if row["op"] not in ("send", "recv", "rpc"):
                group = rank.groups[row["group"]]
                key = row["group"], tuple(group["ranks"]), row["seq"]
                found[key].append((rank, row))
                groups[key] = group
        return [Collective(messages, groups[key]) for key, messages in found.items()]

    def _pairs(self) -> list[tuple[tuple[Rank, Row], tuple[Rank, Row]]]:
        """Each send with its receive."""
        found: dict[Any, dict[str, Any]] = defaultdict(dict)
        for rank, row in self._messages():
            if row["op"] in ("send", "recv"):
                ends = (rank.number, row["peer"])
                source, target = ends if row["op"] == "send" else ends[::-1]
                key = row["group"], source, target, row["tag"], row["seq"]
                found[key][row["op"]] = rank, row
        return [(both["send"], both["recv"]) for both in found.values() if len(both) == 2]

    def _releases(self) -> dict[tuple[int, int], int | None]:
        """(rank, id) -> the release; None where it is unknown."""
        found: dict[tuple[int, int], int | None] = {}
        for rank, row in self._messages():
            found[rank.number, row["id"]] = None
        for one in self.collectives:
            if one.state in ("complete", "open"):
                for rank, row in one.messages:
                    starts = [each["start_ns"] for each in one.needed(rank, row)]
                    found[rank.number, row["id"]] = max([row["start_ns"], *starts])
        for send, receive in self.pairs:
            for (rank, row), (other, its) in ((send, receive), (receive, send)):
                start, end = its["start_ns"], row["end_ns"]
                called = its["enqueue_ns"] or start
                if other.on_host and end is not None and called <= end < start:
                    start = called
                if row["op"] == "send" and end is not None and start > end:
                    start = row["start_ns"]
                found[rank.number, row["id"]] = max(row["start_ns"], start)
        return found

    def waiting_and_transfer(self, rank: Rank) -> tuple[Spans, Spans, Spans]:
        """Waiting, transfer, and the time in which a message waits for its release."""
        transfer, held, unknown = [], [], []
        for row in rank.in_flight:
            start, end = row["start_ns"], row["end_ns"]
            release = self.releases[rank.number, row["id"]]
            if release is None:
                unknown.append((start, end))
            else:
                came = min(release, end)
                held.append((start, came))
                transfer.append((came, end))
        transfers, helds = union(transfer), union(held)
        return without(without(helds, transfers), union(unknown)), transfers, helds

    def is_joined(self, rank: Rank) -> bool:
        """Whether the release of any of its messages is known; without messages, there is none."""
        releases = [self.releases[rank.number, row["id"]] for row in rank.in_flight]
        return not releases or any(release is not None for release in releases)

    def step_span(self, number: int) -> tuple[int, int]:
        spans = [rank.steps[number] for rank in self.ranks.values() if number in rank.steps]
        return min(start for start, _ in spans), max(end for _, end in spans)

    def wall(self, number: int) -> int:
        start, end = self.step_span(number)
        return end - start

    def steady(self) -> list[int]:
        numbers = self.numbers
        if len(numbers) < 2:
            return numbers
        walls = [self.wall(number) for number in numbers]
        half = len(numbers) // 2
        limit = 1.5 * median(walls[half:])
        counts, sizes = dict.fromkeys(numbers, 0), dict.fromkeys(numbers, 0)
        for _, row in self._messages():
            if row["step"] in counts:
                counts[row["step"]] += 1
                sizes[row["step"]] += row["bytes"] or 0
        usual = [median([of[n] for n in numbers[half:]]) for of in (counts, sizes)]
        unlike = [walls[i] > limit or [counts[n], sizes[n]] != usual for i, n in enumerate(numbers)]
        quarter = min(max(1, len(numbers) // 4), 20)
        warm = 1 + max([i for i in range(1, quarter) if unlike[i]], default=0)
        in_a_row = 0
        while 1 + in_a_row < half and walls[1 + in_a_row] > limit:
            in_a_row += 1
        return numbers[max(warm, 1 + min(in_a_row, 20)) :]

    def summary(self) -> Row:
        steady = self.steady()
        sums: dict[str, int] = defaultdict(int)
        own = []
        for rank in self.ranks.values():
            _, _, held = self.waiting_and_transfer(rank)
            parts = {
                "compute": rank.compute,
                "communication": rank.communication,
                "overlap": both(rank.compute, rank.communication),
                "exposed": without(rank.communication, rank.compute),
                "copy": without(rank.copies, union([*rank.compute, *rank.communication])),
                "sync": without(held, rank.compute),
                "update": rank.update,
                "data": rank.data,
                "work": rank.device_work,
            }
            for number in steady:
                if number in rank.steps:
                    window = [rank.steps[number]]
                    own.append(length(window))
                    for name, spans in parts.items():
                        sums[name] += length(both(spans, window))
        wall = sum(own)
        walls = [self.wall(number) / 1e3 for number in steady]
        return {
            "step_us": {"p50": median(walls), "p95": percentile(walls, 95), "mean": fmean(walls)},
            "rank_step_us": {
                "p50": median(own) / 1e3,
                "p95": percentile(list(map(float, own)), 95) / 1e3,
                "mean": fmean(own) / 1e3,
            },
            "overlap_ratio": ratio(sums["overlap"], sums["communication"]),
            "compute_share": ratio(sums["compute"], wall),
            "exposed_comm_share": ratio(sums["exposed"], wall),
            "copy_share": ratio(sums["copy"], wall),
            "idle_share": ratio(wall - sums["work"], wall),
            "sync_overhead_share": ratio(sums["sync"], wall)
            if all(map(self.is_joined, self.ranks.values()))
            else None,
            "update_overhead_share": ratio(sums["update"], wall),
            "data_share": ratio(sums["data"], wall),
            "steps": len(steady),
            "warmup_steps": len(self.numbers) - len(steady),
        }

    def rank_rows(self) -> list[Row]:
        found = []
        steady = self.steady()
        for rank in self.ranks.values():
            waiting, transfer, _ = self.waiting_and_transfer(rank)
            own = [length([rank.steps[n]]) / 1e3 for n in steady if n in rank.steps]
            overlap = length(both(rank.compute, rank.communication))
            work = rank.device_work
            span = work[-1][1] - work[0][0]
            sent = sum(
                (m["bytes"] if m["wire_bytes"] is None else m["wire_bytes"]) or 0
                for m in rank.messages
                if m["op"] != "recv"
                and not (
                    m["op"] in ("broadcast", "scatter")
                    and m["peer"] is not None
                    and m["peer"] != rank.number
                )
            )
            found.append(
                {
                    "rank": rank.number,
                    "step_us_p50": median(own),
                    "step_us_p95": percentile(own, 95),
                    "span_us": span / 1e3,
                    "compute_us": length(rank.compute) / 1e3,
                    "comm_us": length(rank.communication) / 1e3,
                    "overlap_us": overlap / 1e3,
                    "overlap_ratio": ratio(overlap, length(rank.communication)),
                    "exposed_comm_us": (length(rank.communication) - overlap) / 1e3,
                    "copy_us": length(rank.copies) / 1e3,
                    "idle_us": (span - length(work)) / 1e3,
                    "wait_us": length(waiting) / 1e3 if self.is_joined(rank) else None,
                    "transfer_us": length(transfer) / 1e3 if self.is_joined(rank) else None,
                    "host_wait_us": length(rank.blocked) / 1e3,
                    "data_us": length(rank.data) / 1e3,
                    "update_us": length(rank.update) / 1e3,
                    "bytes_sent": sent,
                    "messages": len(rank.messages),
                    "open_messages": sum(m["status"] == "open" for m in rank.messages),
                    "clocks": {
                        clock: sum(m.get("clock") == clock for m in rank.messages)
                        for clock in CLOCKS
                    },
                }
            )
        return found

    def step_rows(self) -> list[Row]:
        first = min(row["start_ns"] for rank in self.ranks.values() for row in rank.rows)
        steady = self.steady()
        found = []
        for number in self.numbers:
            walls, compute, comm, overlap, work = 0, 0, 0, 0, 0
            ranks = [rank for rank in self.ranks.values() if number in rank.steps]
            for rank in ranks:
                window = [rank.steps[number]]
                walls += length(window)
                compute += length(both(rank.compute, window))
                comm += length(both(rank.communication, window))
                overlap += length(both(both(rank.compute, rank.communication), window))
                work += length(both(rank.device_work, window))
            found.append(
                {
                    "step": number,
                    "start_us": (self.step_span(number)[0] - first) / 1e3,
                    "wall_us": self.wall(number) / 1e3,
                    "ranks": len(ranks),
                    "steady": number in steady,
                    "overlap_ratio": ratio(overlap, comm),
                    "compute_share": ratio(compute, walls),
                    "exposed_comm_share": ratio(comm - overlap, walls),
                    "idle_share": ratio(walls - work, walls),
                }
            )
        return found

    def collective_rows(self) -> dict[Any, Row]:
        rows: dict[Any, list[Collective]] = defaultdict(list)
        for one in self.collectives:
            if one.state != "mismatched":
                group = one.group
                rows[one.op, group["name"], len(group["ranks"]), one.bytes].append(one)
        return {key: _collective_row(key, its) for key, its in rows.items()}

    def joining(self) -> Row:
        states = [one.state for one in self.collectives]
        names = ("complete", "partial", "open", "mismatched")
        return {name: states.count(name) for name in names} | {
            "collectives": len(states),
            "p2p": len(self.pairs),
        }

    def straggler_rows(self) -> dict[int, Row]:
        steady = set(self.steady())
        usable = [
            one
            for one in self.collectives
            if one.step in steady
            and one.state in ("complete", "open")
            and len(one.group["ranks"]) > 1
        ]
        late: dict[int, list[float]] = defaultdict(list)
        took_part: dict[int, int] = defaultdict(int)
        for one in usable:
            for rank, _ in one.messages:
                took_part[rank.number] += 1
            if one.arrivals[-1] > one.arrivals[0]:
                *others, last = one.arrivals
                late[one.messages[-1][0].number].append(last - int(median(others)))
        return {
            rank: {
                "rank": rank,
                "lateness_us": median(values) / 1e3,
                "lateness_us_total": sum(values) / 1e3,
                "collectives_last": len(values),
                "share": len(values) / took_part[rank],
            }
            for rank, values in late.items()
        }

    def p2p_rows(self) -> dict[tuple[int, int], Row]:
        found: dict[tuple[int, int], Row] = {}
        for (source, send), (target, _) in self.pairs:
            row = found.setdefault((source.number, target.number), {"count": 0, "bytes": 0})
            row["count"] += 1
            row["bytes"] += send["bytes"]
        return found


def _started(rows: list[Row], end: int | None) -> list[Row]:
    return [row for row in rows if end is None or row["start_ns"] <= end]


def _collective_row(key: Any, its: list[Collective]) -> Row:
    op, _, members, size = key
    timed = [one for one in its if one.timed]
    waits = [[one.arrivals[-1] - at for at in one.arrivals] for one in timed]
    transfers = [one.transfer / 1e3 for one in timed]
    bandwidths = [
        8 * one.size / one.transfer
        for one in timed
        if one.transfer and one.size  # bits / ns
    ]
    spread = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
    factor = 2 * (members - 1) / members if op == "all_reduce" else 1.0
    factor = (members - 1) / members if op in spread else factor
    return {
        "count": len(its),
        "bytes": size,
        "algbw_gbps": median(bandwidths) if bandwidths else None,
        "busbw_gbps": median(bandwidths) * factor if bandwidths else None,
        "wait_us": median(map(fmean, waits)) / 1e3 if timed else None,
        "transfer_us": median(transfers) if timed else None,
        "transfer_us_p95": percentile(transfers, 95) if timed else None,
        "arrival_skew_us": median(w[0] for w in waits) / 1e3 if timed else None,
        "wait_us_total": sum(map(sum, waits)) / 1e3 if timed else None,
        "transfer_us_total": sum(transfers) if timed else None,
        "incomplete": len(its) - len(timed),
    }


def _rows(path: Path, segment: str) -> list[Row]:
    """The rows of one file: of a message with several rows, the last."""
    with pa.memory_map(str(path / f"{segment}.arrow")) as file:
        rows = pa.ipc.open_file(file).read_all().to_pylist()
    last = {
        row["id"]: place
        for place, row in enumerate(rows)
        if row["kind"] == "message" and row["id"] is not None
    }
    return [row for place, row in enumerate(rows) if last.get(_message_id(row), place) == place]


def _message_id(row: Row) -> Any:
    return row["id"] if row["kind"] == "message" else object()
