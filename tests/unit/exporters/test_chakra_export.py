"""A trace that goes to Chakra's format and comes back, and what its nodes depend on."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import proto
from support.made_trace import made_trace

from ddltrace.analyzer.exporters import export
from ddltrace.analyzer.importers.chakra.messages import attributes, messages
from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.tracer.errors import UsageError

SAMPLES = Path(__file__).resolve().parents[3] / "sample_traces"


def sent(trace: Trace) -> dict[tuple[int, str], Counter[Any]]:
    """Per rank and group: operations with their sizes and steps."""
    found: dict[tuple[int, str], Counter[Any]] = defaultdict(Counter)
    for rank in trace.ranks:
        for row in messages_of(trace, rank):
            # A receive has no input.
            size = None if row["op"] == "recv" else row["bytes"]
            key = row["op"], size, row["out_bytes"], row["step"], row["seq"], row["dtype"]
            found[rank, row["group"]][key] += 1
    return found


def message_times(trace: Trace) -> dict[tuple[int, int | None], int]:
    """Nanoseconds of all messages per rank and step."""
    times: Counter[tuple[int, int | None]] = Counter()
    for rank in trace.ranks:
        for row in messages_of(trace, rank):
            times[rank, row["step"]] += row["end_ns"] - row["start_ns"]
    return times


def waits(trace: Trace) -> Counter[Any]:
    """Per rank: name and step of each wait, and the message that it was for."""
    found: Counter[Any] = Counter()
    for rank in trace.ranks:
        numbers = {row["id"]: (row["group"], row["seq"]) for row in messages_of(trace, rank)}
        for row in trace.events(rank).to_pylist():
            if row["kind"] == "wait":
                found[rank, row["name"], row["step"], numbers.get(row["parent"])] += 1
    return found


def messages_of(trace: Trace, rank: int) -> list[dict[str, Any]]:
    return [row for row in trace.events(rank).to_pylist() if row["kind"] == "message"]


@pytest.mark.parametrize("to", ["chakra", "chakra-json"])
def test_a_trace_comes_back(tmp_path: Path, to: str) -> None:
    before = open_trace(SAMPLES / "straggler")
    assert export(before, to, tmp_path / "out") > 1000
    after = open_trace(tmp_path / "out")
    assert sorted(path.name.split(".")[1] for path in (tmp_path / "out").iterdir()) == ["0", "1"]
    assert after.run.source == "chakra"
    assert sent(after) == sent(before)
    assert [after.group_ranks("0", rank) for rank in after.ranks] == [(0, 1), (0, 1)]
    expected, found = message_times(before), message_times(after)
    assert found.keys() == expected.keys()
    for key, count in Counter(
        (rank, row["step"]) for rank in before.ranks for row in messages_of(before, rank)
    ).items():
        # Each message's time is off by less than a microsecond.
        assert abs(found[key] - expected[key]) < count * 1000
    assert waits(after) == waits(before)
    one, other = before.analyze(), after.analyze()
    assert len(other.steps) == len(one.steps) > 20
    for original, again in zip(one.steps, other.steps, strict=True):
        assert again.wall_us == pytest.approx(original.wall_us, abs=2)
        for share in ("overlap_ratio", "compute_share", "exposed_comm_share"):
            assert getattr(again, share) == pytest.approx(getattr(original, share), abs=0.01)
    assert after.events(0).num_rows > 500


def nodes_of(path: Path) -> list[Any]:
    with path.open("rb") as file:
        metadata = proto.parse_length_prefixed(messages().metadata, file)
        assert attributes(metadata)["rank"] == int(path.name.split(".")[1])
        nodes = []
        while (node := proto.parse_length_prefixed(messages().node, file)) is not None:
            nodes.append(node)
    return nodes


def test_dependencies(tmp_path: Path) -> None:
    export(open_trace(SAMPLES / "straggler"), "chakra", tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        nodes = nodes_of(path)
        assert [node.id for node in nodes] == list(range(len(nodes)))
        after_messages = 0
        busy = 0
        for node in nodes:
            for dep in node.data_deps:
                assert dep < node.id
                its = nodes[dep]
                over = its.start_time_micros + its.duration_micros <= node.start_time_micros
                awaited = its.type == 7 and node.type == 4
                # A rank's wait may end before Gloo says that the message is over.
                assert over or awaited
                after_messages += awaited
            # One thread: no piece begins before the piece before it is over.
            if node.type == 4:
                assert node.start_time_micros >= busy
                busy = node.start_time_micros + node.duration_micros
        # DistributedDataParallel waits for its buckets at the end of each backward.
        assert after_messages >= 30
        assert sum(not node.data_deps for node in nodes) < 5


def test_overlap_and_open_messages(tmp_path: Path) -> None:
    before = made_trace()
    export(before, "chakra", tmp_path / "out")
    nodes = nodes_of(tmp_path / "out" / "trace.0.et")
    # The layer is cut where buckets 0 and 1 are handed over; the phase continues after it.
    assert [(node.name, list(node.data_deps)) for node in nodes if node.type != 4] == [
        ("bucket 0", [0]),
        ("bucket 1", [1]),
        ("bucket 2", [4, 5]),
        ("bucket 3", [5, 6]),
    ]
    last = attributes(nodes[-1])
    assert (last["status"], last["comm_size"], last["comm_type"]) == ("open", 16, 0)
    assert sent(open_trace(tmp_path / "out")) == sent(before)


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "trace.0.et").write_text("precious")
    with pytest.raises(UsageError, match="--force"):
        export(made_trace(), "chakra", tmp_path / "out")
    assert (tmp_path / "out" / "trace.0.et").read_text() == "precious"
    export(made_trace(), "chakra", tmp_path / "out", force=True)
    assert nodes_of(tmp_path / "out" / "trace.0.et")
