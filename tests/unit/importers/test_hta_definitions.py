"""The figures by HTA's definitions agree with HTA: within 0.05 points, times within 0.05 %."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import logging
import math
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.hta_reference import open_with_hta, require_hta
from support.sampling import choose_seed

from ddltrace.analyzer.commands import analyze
from ddltrace.analyzer.events.copies import BANDWIDTHS_LABEL
from ddltrace.analyzer.exchange_commands import import_
from ddltrace.analyzer.measures.hta_definitions import hta_ranks
from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.analyzer.query.sql import run_query
from ddltrace.tracer.errors import TraceError, UsageError

RANDOM_JOBS = 12
"""Jobs of two ranks, so 24 files."""

# Computed with HTA 0.5.0 on the DLRM files.
REFERENCE = {
    0: (4.50, 6419, 1034, 13009),
    1: (2.47, 6428, 1246, 18749),
    2: (7.88, 7046, 1068, 11350),
    3: (3.31, 8145, 1240, 18853),
    4: (0.56, 8887, 1126, 16589),
    5: (0.64, 9121, 1041, 16392),
    6: (7.56, 7051, 1051, 11410),
    7: (9.51, 8308, 1059, 10967),
}


def figures(path: Path) -> dict[int, tuple[float, float, float, float]]:
    return {
        each.rank: (
            each.overlap_percent or 0,
            each.idle_us,
            each.compute_us,
            each.kernel_time_us,
        )
        for each in (found.breakdown for found in hta_ranks(open_trace(path)))
        if each is not None
    }


def agrees(found: tuple[float, ...], expected: tuple[float, ...]) -> bool:
    """Whether overlap (percent) and times agree; HTA rounds the overlap to two digits."""
    overlap = 0.0 if math.isnan(expected[0]) else expected[0]
    same_overlap = found[0] == pytest.approx(overlap, abs=0.05 + 0.005)
    return same_overlap and found[1:] == pytest.approx(expected[1:], rel=5e-4)


def hta_figures(folder: Path) -> dict[int, tuple[float, float, float, float]]:
    """What HTA itself computes."""
    analysis = open_with_hta(folder)
    overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
    breakdown = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    return {
        int(rank): (
            float(overlap.loc[rank, "comp_comm_overlap_pctg"]),
            float(breakdown.loc[rank, "idle_time(us)"]),
            float(breakdown.loc[rank, "compute_time(us)"]),
            float(breakdown.loc[rank, "kernel_time(us)"]),
        )
        for rank in overlap.index
    }


def write_steps(folder: Path, *, fractional: bool, seed: int) -> Path:
    """Hand-made files of two ranks with several steps, overlaps, copies and syncs."""
    choice = random.Random(seed)
    folder.mkdir()
    for rank in range(2):
        events: list[dict[str, Any]] = []
        number = 0
        for step in range(4):
            begin = 1000 * step + 50
            events.append(
                {
                    "ph": "X",
                    "cat": "user_annotation",
                    "name": f"ProfilerStep#{step}",
                    "pid": 9,
                    "tid": 9,
                    "ts": begin,
                    "dur": 1000,
                }
            )
            for _ in range(30):
                number += 1
                launch = begin + choice.uniform(0, 900)
                ts, dur = launch + choice.uniform(1, 400), choice.uniform(0.2, 60)
                if not fractional:
                    launch, ts, dur = round(launch), round(ts), round(dur)
                name, category, stream = choice.choice(
                    [
                        ("gemm", "kernel", 7),
                        ("elementwise_kernel", "kernel", 7),
                        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(a)", "kernel", 20),
                        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 13),
                        ("Stream Sync", "cuda_sync", 7),
                    ]
                )
                link = {"correlation": 1_000_000 + number}
                for event in (
                    {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launch, "dur": 1},
                    {"cat": category, "name": name, "ts": ts, "dur": dur},
                ):
                    on_device = event["cat"] != "cuda_runtime"
                    events.append(
                        {
                            "ph": "X",
                            "pid": rank if on_device else 9,
                            "tid": stream if on_device else 9,
                            **event,
                            "ts": round(float(event["ts"]), 3) if fractional else event["ts"],
                            "dur": round(float(event["dur"]), 3) if fractional else event["dur"],
                            "args": {**link, "stream": stream} if on_device else link,
                        }
                    )
        text = json.dumps(
            {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}, indent=1
        )
        (folder / f"rank-{rank}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    return folder


def test_reference_values(dlrm: Path) -> None:
    found = figures(dlrm)
    assert found.keys() == REFERENCE.keys()
    for rank, expected in REFERENCE.items():
        assert agrees(found[rank], expected), rank


def test_equal_to_hta_on_a_real_job(dlrm: Path) -> None:
    require_hta()
    expected = hta_figures(dlrm)
    for rank, found in figures(dlrm).items():
        assert agrees(found, expected[rank]), rank


@pytest.mark.parametrize("fractional", [False, True])
def test_equal_to_hta_on_several_steps(tmp_path: Path, fractional: bool) -> None:
    require_hta()
    folder = write_steps(tmp_path / "job", fractional=fractional, seed=0)
    expected = hta_figures(folder)
    for rank, found in figures(folder).items():
        assert agrees(found, expected[rank]), rank


NAMES = (
    ("gemm", "kernel"),
    ("void elementwise_kernel<128, 4>(int)", "kernel"),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(a)", "kernel"),
    ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(b)", "kernel"),
    ("dmaCopyKernel", "kernel"),
    ("void cub::DeviceMemcpyBatched", "kernel"),
    ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy"),
    ("Memset (Device)", "gpu_memset"),
    ("Stream Sync", "cuda_sync"),
    ("Stream Wait Event", "cuda_sync"),
    ("Event Sync", "cuda_sync"),
    ("Context Sync", "cuda_sync"),
)


class RandomFile:
    """The events of one rank's Kineto file, drawn at random.

    Left out, because HTA's figures are not defined there (it sorts with a sort that is not
    stable): device work shorter than a microsecond that begins in the same microsecond as other
    device work, where times have fractions. Ranks of one job share an origin, because HTA measures
    all times from the earliest of all ranks, and loses fractions where ranks are years apart. All
    ranks have steps or none has: HTA fails on a rank without device work before the last step.
    """

    def __init__(self, choice: random.Random, origin: int, least_steps: int) -> None:
        self.choice = choice
        self.fractions = choice.choice([False, True])
        self.origin = origin
        self.digits = choice.choice([1, 3])
        self.steps = least_steps * choice.choice([1, 2, 4])
        self.taken: set[int] = set()
        self.short: set[int] = set()
        self.events: list[dict[str, Any]] = []
        if choice.random() < 0.5:
            metadata = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}
            self.events.append(metadata | choice.choice([{}, {"ts": self.origin}]))
        if choice.random() < 0.3:
            ts = self.origin + choice.choice([3, 3.0, 3.5])
            self.events.append(
                {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 0, "ts": ts}
            )
        for step in range(self.steps):
            self.add(f"ProfilerStep#{step}", "user_annotation", 1000 * step + 50, 990)
        for number in range(choice.randint(5, 60)):
            self.add_work(number)
        # One that is always there.
        self.add("cudaLaunchKernel", "cuda_runtime", 20, 5, correlation=999)
        self.add("gemm", "kernel", 30, 40.5, stream=7, correlation=999)
        choice.shuffle(self.events)
        # HTA does not link a call to its work if that is the first event of a file.
        self.events.sort(key=lambda event: event["name"] != f"ProfilerStep#{self.steps - 1}")
        if not self.steps:
            self.add("aten::mm", "cpu_op", 10, 9)
            self.events.insert(0, self.events.pop())

    def add(self, name: str, category: str, start: float, length: float, **args: int) -> None:
        """Adds an event with times in microseconds since the origin."""
        ts = round(self.origin + start, self.digits) if self.fractions else round(start)
        if not self.fractions:
            ts += self.origin
        dur = round(length, self.digits) if self.fractions else round(length)
        if "stream" in args:
            begin, is_short = math.ceil(ts), self.fractions and dur < 1
            if begin in self.short or (is_short and begin in self.taken):
                return
            (self.short if is_short else self.taken).add(begin)
        thread = {"pid": 0, "tid": args["stream"]} if "stream" in args else {"pid": 9, "tid": 9}
        event = {"ph": "X", "cat": category, "name": name, **thread, "ts": ts, "dur": dur}
        self.events.append(event | {"args": args})

    def add_work(self, number: int) -> None:
        """Adds device work, mostly with the call that launched it."""
        choice = self.choice
        launch = choice.uniform(0, 1000 * max(self.steps, 1) + 100)
        name, category = choice.choice(NAMES)
        length = choice.choice([choice.uniform(0.1, 3), choice.uniform(1, 80)])
        args = {"stream": choice.choice([7, 7, 13, 20]), "correlation": number}
        if name in ("Event Sync", "Context Sync"):
            args["stream"] = choice.choice([-1, 7])
        call = "cudaStreamSynchronize" if category == "cuda_sync" else "cudaLaunchKernel"
        if choice.random() < 0.8:
            self.add(call, "cuda_runtime", launch, 4.5, correlation=number)
        elif category != "cuda_sync" and choice.random() < 0.5:
            self.add("cuLaunchKernel", "cuda_driver", launch, 4.5, correlation=number)
        self.add(name, category, launch + choice.uniform(1, 400), length, **args)
        if choice.random() < 0.3:
            self.add("aten::mm", "cpu_op", launch, 9.25)


def write_random(folder: Path, seed: int) -> Path:
    """Files of two ranks."""
    choice = random.Random(seed)
    folder.mkdir()
    origin = choice.choice([0, 0, 5_000_000, 1_700_000_000_000_000])
    least_steps = choice.choice([0, 1, 1, 1])
    for rank in range(2):
        document = {
            "schemaVersion": 1,
            "distributedInfo": {"rank": rank, "world_size": 2},
            "traceEvents": RandomFile(choice, origin, least_steps).events,
        }
        if origin < 1_000_000_000 and choice.random() < 0.3:
            document["baseTimeNanoseconds"] = 1_700_000_000_000_000_123
        (folder / f"rank-{rank}.json").write_text(json.dumps(document, indent=1))
    return folder


def check_random(folder: Path, seed: int) -> str | None:
    """Compares the command with HTA on the files of one seed.

    Returns:
        What differs; None if nothing does.
    """
    write_random(folder, seed)
    try:
        expected = hta_figures(folder)
    except AssertionError:  # negative lengths, from rounding, of work that is not computation
        return None
    result = run_analyze(folder, "--json", "--definitions", "hta")
    wrong = {
        rank: (found, expected[rank])
        for rank, (overlap, *others) in ranks_of(result).items()
        if not agrees(found := (100 * (overlap or 0.0), *others), expected[rank])
    }
    return f"seed {seed}: {wrong}" if wrong or len(expected) != 2 else None


def test_equal_to_hta_on_random_files(tmp_path: Path) -> None:
    require_hta()
    first = choose_seed()
    print("first seed:", first)
    failed = [check_random(tmp_path / str(n), first + n) for n in range(RANDOM_JOBS)]
    assert not any(failed), [each for each in failed if each]


def device_events(name: str, *times: tuple[float, float], **args: int) -> list[dict[str, Any]]:
    """Kernels of stream 7 with these starts and lengths in microseconds."""
    common = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7}
    return [{**common, "ts": ts, "dur": dur, "args": {"stream": 7, **args}} for ts, dur in times]


def host_event(name: str, category: str, ts: float, dur: float, **args: int) -> dict[str, Any]:
    """An event of a thread."""
    where = {"ph": "X", "pid": 9, "tid": 9}
    return {**where, "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}


STEPS = [host_event(f"ProfilerStep#{n}", "user_annotation", 1000 * n, 1000) for n in (1, 2)]
LAUNCH = host_event("cudaLaunchKernel", "cuda_runtime", 1100, 5, correlation=1)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param(
            [
                *STEPS,
                LAUNCH,
                *device_events("gemm", (1200, 10), correlation=1),
                *device_events("gemm", (1300, 10), correlation=2),
            ],
            (0, 0, 10, 10),
            id="launch not recorded",
        ),
        pytest.param(
            [
                *STEPS,
                *device_events("gemm", (2400, 10), correlation=1),
                host_event("cudaLaunchKernel", "cuda_runtime", 2100, 5, correlation=1),
                host_event("ProfilerStep#2", "gpu_user_annotation", 2300, 900),
            ],
            (0, 0, 10, 10),
            id="annotation on the device begins the last step",
        ),
        pytest.param(
            [*device_events("gemm", (10, 2.5), (20, 2.5))],
            (0, 7.5, 5.0, 12.5),
            id="fractions of lengths only",
        ),
    ],
)
def test_conventions_of_hta(
    tmp_path: Path, events: list[dict[str, Any]], expected: tuple[float, ...]
) -> None:
    document = {"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}
    (tmp_path / "a.json").write_text(json.dumps(document, indent=1))
    assert figures(tmp_path)[0] == expected
    if importlib.util.find_spec("hta"):
        of_hta = hta_figures(tmp_path)[0]
        assert of_hta[1:] == expected[1:]


def test_all_files_of_a_rank_count(tmp_path: Path) -> None:
    for number in range(2):
        events = device_events("gemm", (1000 * number, 10))
        document = {"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}
        (tmp_path / f"{number}.json").write_text(json.dumps(document, indent=1))
    assert figures(tmp_path) == {0: (0, 990, 20, 1010)}


def test_last_of_several_steps_is_dropped(tmp_path: Path) -> None:
    folder = write_steps(tmp_path / "job", fractional=False, seed=0)
    for _, _, compute, kernel_time in figures(folder).values():
        assert 0 < compute < kernel_time
        # Work launched in the first three of four steps of 1000 microseconds, begun at most
        # 400 behind its launch.
        assert kernel_time <= 3 * 1000 + 400 + 60


def test_rounding_inwards_by_hand(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 10.4, "dur": 5.2},  # 11 to 15
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 13.0, "dur": 7.9},  # 13 to 20
        {"cat": "kernel", "name": "gemm", "ts": 30.9, "dur": 2.0},  # 31 to 32
    ]
    rows = [
        {"ph": "X", "pid": 0, "tid": 7, "args": {"stream": 7, "correlation": number}, **event}
        for number, event in enumerate(events)
    ]
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": rows}))
    [(overlap, idle, compute, kernel_time)] = figures(file).values()
    assert (idle, compute, kernel_time) == (11, 5, 21)
    assert overlap == pytest.approx(100 * 2 / 7, abs=0.01)


def test_a_job_without_a_gpu_has_no_breakdown(foreign: Path) -> None:
    assert figures(foreign / "kineto-cpu") == {}


def run_analyze(*arguments: object) -> Result:
    return CliRunner().invoke(analyze, [str(argument) for argument in arguments])


def ranks_of(result: Result) -> dict[int, tuple[float | None, ...]]:
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    return {
        row["rank"]: tuple(
            row[key] for key in ("overlap_ratio", "idle_us", "compute_us", "span_us")
        )
        for row in document["ranks"]
    }


@pytest.mark.parametrize("definitions", ["ddltrace", "hta"])
def test_both_definitions_agree_where_there_is_one_step(dlrm: Path, definitions: str) -> None:
    result = run_analyze(dlrm, "--json", "--definitions", definitions)
    assert json.loads(result.stdout)["definitions"] == definitions
    found = ranks_of(result)
    for rank, (overlap, *others) in REFERENCE.items():
        expected = (overlap / 100, *others)
        assert found[rank] == pytest.approx(expected, rel=1e-3, abs=5e-5), rank


def test_command_gives_hta_values_where_they_differ(tmp_path: Path) -> None:
    folder = write_steps(tmp_path / "job", fractional=False, seed=0)
    expected = figures(folder)
    found = ranks_of(run_analyze(folder, "--json", "--definitions", "hta"))
    ours = ranks_of(run_analyze(folder, "--json"))
    for rank, (overlap, idle, compute, kernel_time) in expected.items():
        assert found[rank] == pytest.approx((overlap / 100, idle, compute, kernel_time), abs=5e-5)
        assert ours[rank][3] > found[rank][3], "ours keep the last step"
    report = run_analyze(folder, "--definitions", "hta").stdout
    lines = report.partition("Ranks by the definitions of HTA")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.split()[:1] == ["rank"]) + 1
    table = lines[first : first + len(expected)]
    assert [line.split() for line in table] == [
        [str(rank), f"{o:.2f}", *(f"{value:.0f}" for value in others)]
        for rank, (o, *others) in expected.items()
    ]


def test_imported_trace_keeps_hta_values(tmp_path: Path) -> None:
    folder = write_steps(tmp_path / "job", fractional=True, seed=1)
    target = tmp_path / "imported"
    done = CliRunner().invoke(import_, [str(folder), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert figures(target) == figures(folder)


def test_without_device_work_there_are_no_values(foreign: Path) -> None:
    found = ranks_of(run_analyze(foreign / "kineto-cpu", "--json", "--definitions", "hta"))
    assert set(found.values()) == {(None, None, None, None)}
    report = run_analyze(foreign / "kineto-cpu", "--definitions", "hta").stdout
    assert "no rank has device work" in report


def test_other_traces_and_chosen_steps_are_refused(foreign: Path) -> None:
    native = Path(__file__).resolve().parents[3] / "sample_traces" / "straggler"
    with pytest.raises(UsageError, match="leave out --definitions hta"):
        hta_ranks(open_trace(native))
    result = run_analyze(foreign / "kineto-cpu", "--definitions", "hta", "--steps", "0:2")
    assert result.exit_code != 0
    assert "leave out --steps" in result.output + str(result.exception)


DESCRIBED = ("count", "mean", "std", "min", "25%", "50%", "75%", "max")


def tables_of_hta(folder: Path, rank: int) -> tuple[Any, Any, Any]:
    """HTA's idle times, queue lengths and bandwidths of one rank; None for a table it fails on."""
    analysis = open_with_hta(folder)
    idle: dict[Any, Any] = {}
    table, _ = analysis.get_idle_time_breakdown(ranks=[rank], visualize=False)
    for stream, part in table.groupby("stream"):
        causes = dict(zip(part["idle_category"], part["idle_time"], strict=True))
        names = ("host_wait", "kernel_wait", "other")
        idle[int(stream)] = [float(causes.get(name, 0)) for name in names]
    described: list[dict[Any, Any] | None] = []
    for summary, column in (
        (analysis.get_queue_length_summary, "queue_length"),
        (analysis.get_memory_bw_summary, "memory_bw_gbps"),
    ):
        try:
            found = summary(ranks=[rank])
        except AssertionError:  # a call and its work that HTA cannot distinguish
            described.append(None)
            continue
        rows = [] if found is None else found[column].iterrows()
        described.append({key[1]: [row[name] for name in DESCRIBED] for key, row in rows})
    queues, bandwidths = described
    return idle, queues, bandwidths


def our_tables(folder: Path, rank: int) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
    """The same tables by ``analyze --definitions hta``."""
    found = json.loads(run_analyze(folder, "--json", "--definitions", "hta").stdout)["hta"]
    return tuple(  # type: ignore[return-value]
        {
            row[key]: [value for name, value in row.items() if name not in ("rank", key)]
            for row in found[table]
            if row["rank"] == rank
        }
        for table, key in (
            ("idle_time", "stream"),
            ("queue_length", "stream"),
            ("memory_bandwidth", "name"),
        )
    )


def assert_same_tables(folder: Path, rank: int) -> None:
    for found, expected in zip(our_tables(folder, rank), tables_of_hta(folder, rank), strict=True):
        if expected is None:
            continue
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            numbers = [math.nan if value is None else value for value in found[key]]
            # HTA rounds idle times to two digits.
            assert numbers == pytest.approx(values, rel=5e-4, abs=0.0101, nan_ok=True), (rank, key)


@pytest.mark.parametrize("rank", [1, 3])
def test_tables_of_streams_are_hta_s_on_a_real_job(dlrm: Path, rank: int) -> None:
    """On these ranks, the file holds kernels whose launch it does not hold."""
    require_hta()
    assert_same_tables(dlrm, rank)
    idle, queue, _ = tables_of_hta(dlrm, rank)
    for row in open_trace(dlrm).analyze().streams:
        if row.rank == rank:
            stream = int(row.stream.removeprefix("stream-"))
            assert [row.host_wait_us, row.kernel_wait_us, row.other_us] == idle[stream]
            assert row.queue_mean == pytest.approx(queue[stream][1])
            assert row.queue_max == queue[stream][-1]


def spread_times(events: list[dict[str, Any]]) -> None:
    """Gives events distinct whole times: HTA does not define the order of equal ones."""
    used: set[int] = set()
    first = int(min(event["ts"] for event in events if "ts" in event))
    for event in events:
        if "ts" in event:
            at = first + round(10 * (event["ts"] - first))
            while at in used:
                at += 1
            used.add(at)
            event["ts"] = at
        if "dur" in event:
            event["dur"] = round(10 * event["dur"])


def test_tables_of_streams_are_hta_s_on_random_files(tmp_path: Path) -> None:
    require_hta()
    first = choose_seed()
    print("first seed:", first)
    for seed in range(first, first + 4):
        folder = write_random(tmp_path / str(seed), seed)
        choice = random.Random(seed)
        for path in folder.iterdir():
            document = json.loads(path.read_text())
            events = document["traceEvents"]
            # HTA keeps times as floats if one event of the job has none, and the order of equal
            # times depends on that.
            document["traceEvents"] = [event for event in events if event["ph"] != "M"]
            for event in document["traceEvents"]:
                if event["name"].startswith("Mem") and choice.random() < 0.9:
                    event["args"]["memory bandwidth (GB/s)"] = round(choice.uniform(0.1, 20), 6)
            spread_times(document["traceEvents"])
            path.write_text(json.dumps(document))
        for rank in range(2):
            assert_same_tables(folder, rank)


def series_of(trace: Trace, table: str) -> list[tuple[int, list[Any], list[float], list[float]]]:
    """Of each rank in a table: its keys, times and values."""
    whole = run_query(trace, f"SELECT * FROM {table}")
    ranks, keys, times, values = (whole.column(place).to_pylist() for place in range(4))
    rows = list(zip(ranks, keys, times, values, strict=True))
    found = []
    for rank in sorted(set(ranks)):
        mine = [row[1:] for row in rows if row[0] == rank]
        found.append((rank, *map(list, zip(*mine, strict=True))))
    return found


def check_series(folder: Path) -> None:
    """Compares both time series with those of HTA."""
    analysis = open_with_hta(folder)
    trace = open_trace(folder)
    for table, compute in (
        ("hta_queue_length", analysis.get_queue_length_time_series),
        ("hta_copy_bandwidth", analysis.get_memory_bw_time_series),
    ):
        expected: dict[int, Any] = {}
        for rank in trace.ranks:
            # HTA fails where a call and its work cannot be distinguished.
            with contextlib.suppress(AssertionError):
                expected |= compute(ranks=[rank])
        if "bandwidth" in table:  # HTA counts kernels with such names as copies of 0 GB/s
            copies = {r: rows[rows["name"] != "Memcpy Unknown"] for r, rows in expected.items()}
            expected = {rank: rows for rank, rows in copies.items() if len(rows)}
        found = [each for each in series_of(trace, table) if each[0] in expected]
        assert [rank for rank, *_ in found] == sorted(expected)
        for rank, keys, times, values in found:
            theirs = expected[rank]
            key, value = (
                ("stream", "queue_length") if "queue" in table else ("name", "memory_bw_gbps")
            )
            assert keys == theirs[key].tolist()
            assert times == pytest.approx(theirs["ts"].tolist(), abs=1e-6)
            assert values == pytest.approx(theirs[value].tolist(), abs=1e-9)


def test_time_series_equal_those_of_hta(dlrm: Path, tmp_path: Path) -> None:
    require_hta()
    logging.getLogger("hta").setLevel(logging.ERROR)
    (tmp_path / "dlrm").mkdir()
    for rank in range(2):
        shutil.copy(dlrm / f"rank-{rank}.json.gz", tmp_path / "dlrm")
    check_series(tmp_path / "dlrm")
    first = choose_seed()
    print("first seed:", first)
    folder = write_random(tmp_path / "random", first)
    choice = random.Random(first)
    for path in folder.iterdir():
        document = json.loads(path.read_text())
        for event in document["traceEvents"]:
            if event.get("cat", "").startswith("gpu_mem"):
                event["args"]["memory bandwidth (GB/s)"] = choice.uniform(1, 900)
        path.write_text(json.dumps(document, indent=1))
    check_series(folder)


def test_time_series_are_kept_and_checked(tmp_path: Path) -> None:
    folder = write_steps(tmp_path / "job", fractional=False, seed=1)
    expected = series_of(open_trace(folder), "hta_queue_length")
    assert expected
    done = CliRunner().invoke(import_, [str(folder), "-o", str(tmp_path / "kept")])
    assert done.exit_code == 0, done.output
    assert series_of(open_trace(tmp_path / "kept"), "hta_queue_length") == expected


def test_times_of_queues_count_from_the_first_event_as_rounded(tmp_path: Path) -> None:
    launch = host_event("cudaLaunchKernel", "cuda_runtime", 11.5, 4.0, correlation=1)
    kernel = device_events("gemm", (20.25, 5.0), correlation=1)
    (tmp_path / "rank-0.json").write_text(json.dumps({"traceEvents": [launch, *kernel]}))
    # Both times rounded up: 12 and 21 us.
    assert series_of(open_trace(tmp_path), "hta_queue_length") == [(0, [7, 7], [0, 9], [1, 0])]


def test_of_calls_at_one_time_the_one_that_launches_is_taken(tmp_path: Path) -> None:
    waits = host_event("cudaStreamSynchronize", "cuda_runtime", 100, 4, correlation=1)
    launch = host_event("cudaLaunchKernel", "cuda_runtime", 100, 4, correlation=2)
    copy = device_events("Memcpy HtoD (Pinned -> Device)", (120, 5), correlation=2)[0]
    events = [waits, launch, copy | {"cat": "gpu_memcpy"}]
    (tmp_path / "rank-0.json").write_text(json.dumps({"traceEvents": events}))
    assert series_of(open_trace(tmp_path), "hta_queue_length") == [(0, [7, 7], [0, 20], [1, 0])]


def test_stated_bandwidths_are_kept_and_checked(tmp_path: Path) -> None:
    copy = device_events("Memcpy HtoD (Pinned -> Device)", (1200, 10), bytes=1000)[0]
    stated = copy | {"cat": "gpu_memcpy"}
    stated["args"] |= {"memory bandwidth (GB/s)": 7.5}
    (tmp_path / "rank-0.json").write_text(json.dumps({"traceEvents": [stated]}))
    target = tmp_path / "kept"
    done = CliRunner().invoke(import_, [str(tmp_path / "rank-0.json"), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert series_of(open_trace(target), "hta_copy_bandwidth")[0][3] == [7.5, 0]
    described = target / "run.json"
    run = json.loads(described.read_text())
    run["labels"][BANDWIDTHS_LABEL]["0"] = ["much"]
    described.write_text(json.dumps(run))
    with pytest.raises(TraceError, match="the bandwidths of copies cannot be read"):
        series_of(open_trace(target), "hta_copy_bandwidth")


@pytest.mark.parametrize(("ts", "dur"), [(1e300, 1), (5, 1e300), (1e300, 1e300), (-1e300, 2)])
def test_times_beyond_64_bits_are_no_warning(tmp_path: Path, ts: float, dur: float) -> None:
    events = [*device_events("gemm", (100, 10), (ts, dur), correlation=1), LAUNCH]
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with contextlib.suppress(TraceError):
            open_trace(path)
