"""The figures by HTA's definitions agree with HTA: within 0.05 points, times within 0.05 %."""

from __future__ import annotations

import contextlib
import json
import math
import random
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
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.query.sql import run_query
from ddltrace.tracer.errors import TraceError, UsageError

RANDOM_JOBS = 10
"""Jobs of two ranks, so 20 files."""

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
DESCRIBED = ("count", "mean", "std", "min", "25%", "50%", "75%", "max")
Figures = dict[int, tuple[float, float, float, float]]
Tables = tuple[dict[Any, list[float]], dict[Any, list[float]] | None, dict[Any, list[float]]]
Series = dict[tuple[Any, float], float]


def run_analyze(*arguments: object) -> Result:
    result = CliRunner().invoke(analyze, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def document_of(path: Path, definitions: str = "hta") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        run_analyze(path, "--json", "--definitions", definitions).stdout
    )
    assert found["definitions"] == definitions
    return found


def figures(path: Path, definitions: str = "hta") -> Figures:
    """Overlap (percent), idle, compute and kernel time of each rank with device work."""
    return {
        row["rank"]: (
            100 * (row["overlap_ratio"] or 0),
            row["idle_us"],
            row["compute_us"],
            row["span_us"],
        )
        for row in document_of(path, definitions)["ranks"]
        if row["span_us"] is not None
    }


def figures_of_hta(analysis: Any) -> Figures:
    overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
    breakdown = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    share = overlap["comp_comm_overlap_pctg"].fillna(0)
    times = breakdown[["idle_time(us)", "compute_time(us)", "kernel_time(us)"]]
    return {int(rank): (float(share[rank]), *map(float, times.loc[rank])) for rank in share.index}


def assert_agree(found: Figures, expected: Figures) -> None:
    assert found.keys() == expected.keys()
    for rank, (overlap, *others) in expected.items():
        # HTA rounds the overlap to two digits.
        assert found[rank][0] == pytest.approx(overlap, abs=0.055), rank
        assert found[rank][1:] == pytest.approx(others, rel=5e-4), rank


def tables(path: Path, rank: int) -> Tables:
    """Idle times, queue lengths and bandwidths of one rank."""
    found = document_of(path)["hta"]
    return tuple(  # type: ignore[return-value]
        {
            row[key]: [
                math.nan if value is None else value
                for name, value in row.items()
                if name not in ("rank", key)
            ]
            for row in found[table]
            if row["rank"] == rank
        }
        for table, key in (
            ("idle_time", "stream"),
            ("queue_length", "stream"),
            ("memory_bandwidth", "name"),
        )
    )


def tables_of_hta(analysis: Any, rank: int) -> Tables:
    """The same; None for queues on which HTA fails."""
    idle = {}
    table, _ = analysis.get_idle_time_breakdown(ranks=[rank], visualize=False)
    for stream, part in table.groupby("stream"):
        causes = dict(zip(part["idle_category"], part["idle_time"], strict=True))
        names = ("host_wait", "kernel_wait", "other")
        idle[int(stream)] = [float(causes.get(name, 0)) for name in names]
    queues = None
    with contextlib.suppress(AssertionError):  # the work of a launch is not in the file
        queues = described(analysis.get_queue_length_summary(ranks=[rank]), "queue_length")
    bandwidths = described(analysis.get_memory_bw_summary(ranks=[rank]), "memory_bw_gbps")
    return idle, queues, bandwidths


def described(summary: Any, column: str) -> dict[Any, list[float]]:
    rows = [] if summary is None else summary[column].iterrows()
    return {key[1]: [row[name] for name in DESCRIBED] for key, row in rows}


def assert_same_tables(found: Tables, expected: Tables) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is not None:
            assert ours is not None
            assert ours.keys() == theirs.keys()
            for key, values in theirs.items():
                # HTA rounds idle times to two digits.
                assert ours[key] == pytest.approx(values, rel=5e-4, abs=0.0101, nan_ok=True), key


def series(path: Path, table: str, rank: int) -> Series:
    """(Stream or kind of copy, time) -> value from then on."""
    rows = run_query(open_trace(path), f"SELECT * FROM {table} WHERE rank = {rank}").to_pylist()
    return {(key, time): value for _, key, time, value in map(dict.values, rows)}


def assert_same_series(path: Path, analysis: Any, rank: int) -> None:
    """Compares both time series; of values at the same time, the last."""
    rows_of: dict[str, Any] = {}
    with contextlib.suppress(AssertionError):  # the work of a launch is not in the file
        rows_of["hta_queue_length"] = analysis.get_queue_length_time_series(ranks=[rank])
    rows_of["hta_copy_bandwidth"] = analysis.get_memory_bw_time_series(ranks=[rank])
    for table, rows in rows_of.items():
        queue = table == "hta_queue_length"
        key, value = ("stream", "queue_length") if queue else ("name", "memory_bw_gbps")
        columns = [rows[rank][name] for name in (key, "ts", value)] if rank in rows else []
        # HTA counts kernels with such names as copies of 0 GB/s.
        expected = {
            (k, time): v for k, time, v in zip(*columns, strict=True) if k != "Memcpy Unknown"
        }
        assert series(path, table, rank) == pytest.approx(expected, abs=1e-9)


def write(path: Path, events: list[dict[str, Any]], **head: Any) -> Path:
    # One line for each entry: HTA looks for the rank line by line.
    path.write_text(json.dumps({**head, "traceEvents": events}, indent=1))
    return path


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

    Ranks of one job share an origin, because HTA measures all times from the earliest of all ranks,
    and loses fractions where ranks are years apart. All ranks have steps or none has: HTA fails on
    a rank without device work before the last step.
    """

    def __init__(self, choice: random.Random, origin: int, least_steps: int) -> None:
        self.choice = choice
        self.fractions = choice.choice([False, True])
        self.origin = origin
        self.digits = choice.choice([1, 3])
        self.steps = least_steps * choice.choice([1, 2, 4])
        self.events: list[dict[str, Any]] = []
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

    def add(self, name: str, category: str, start: float, length: float, **args: float) -> None:
        """Adds an event with times in microseconds since the origin."""
        ts = round(self.origin + start, self.digits) if self.fractions else round(start)
        if not self.fractions:
            ts += self.origin
        dur = round(length, self.digits) if self.fractions else round(length)
        thread = {"pid": 0, "tid": args["stream"]} if "stream" in args else {"pid": 9, "tid": 9}
        event = {"ph": "X", "cat": category, "name": name, **thread, "ts": ts, "dur": dur}
        self.events.append(event | {"args": args})

    def add_work(self, number: int) -> None:
        """Adds device work, mostly with the call that launched it."""
        choice = self.choice
        launch = choice.uniform(0, 1000 * max(self.steps, 1) + 100)
        name, category = choice.choice(NAMES)
        args: dict[str, float] = {"stream": choice.choice([7, 7, 13, 20]), "correlation": number}
        if name in ("Event Sync", "Context Sync"):
            args["stream"] = choice.choice([-1, 7])
        if category.startswith("gpu_mem") and choice.random() < 0.9:
            args["memory bandwidth (GB/s)"] = round(choice.uniform(0.1, 20), 6)
        call = "cudaStreamSynchronize" if category == "cuda_sync" else "cudaLaunchKernel"
        if choice.random() < 0.8:
            self.add(call, "cuda_runtime", launch, 4.5, correlation=number)
        elif category != "cuda_sync" and choice.random() < 0.5:
            self.add("cuLaunchKernel", "cuda_driver", launch, 4.5, correlation=number)
        # HTA gives shorter work negative lengths where times have fractions.
        self.add(name, category, launch + choice.uniform(1, 400), choice.uniform(1, 80), **args)
        if choice.random() < 0.3:
            self.add("aten::mm", "cpu_op", launch, 9.25)

    def spread_times(self) -> None:
        """Gives events distinct whole times: HTA does not define the order of equal ones."""
        used: set[int] = set()
        for event in self.events:
            at = self.origin + round(10 * (event["ts"] - self.origin))
            while at in used:
                at += 1
            used.add(at)
            event["ts"], event["dur"] = at, round(10 * event["dur"])


def write_random(folder: Path, seed: int, *, spread: bool = False, least_steps: int = 0) -> Path:
    """Files of two ranks, which have a multiple of that number of steps."""
    choice = random.Random(seed)
    folder.mkdir()
    origin = choice.choice([0, 0, 5_000_000, 1_700_000_000_000_000])
    least_steps = least_steps or choice.choice([0, 1, 1, 1])
    head: dict[str, Any] = {"schemaVersion": 1}
    if origin < 1_000_000_000 and choice.random() < 0.3:
        head["baseTimeNanoseconds"] = 1_700_000_000_000_000_123
    for rank in range(2):
        file = RandomFile(choice, origin, least_steps)
        if spread:
            file.spread_times()
        head["distributedInfo"] = {"rank": rank, "world_size": 2}
        write(folder / f"rank-{rank}.json", file.events, **head)
    return folder


def test_reference_values(dlrm: Path) -> None:
    assert_agree(figures(dlrm), REFERENCE)
    # One step of whole microseconds: the definitions do not differ.
    for rank, expected in figures(dlrm, "ddltrace").items():
        assert expected == pytest.approx(REFERENCE[rank], rel=1e-3, abs=5e-3), rank


def test_a_real_job_as_by_hta(dlrm: Path) -> None:
    analysis = open_with_hta(dlrm)
    assert_agree(figures(dlrm), figures_of_hta(analysis))
    for rank in (1, 3):  # these files hold kernels whose launch they do not hold
        idle, queues, bandwidths = tables_of_hta(analysis, rank)
        found = tables(dlrm, rank)
        assert_same_tables((found[0], None, found[2]), (idle, None, bandwidths))
        assert queues is not None
        for stream, expected in queues.items():
            # Several changes of a queue in one microsecond.
            assert found[1][stream] == pytest.approx(expected, rel=0.01)
        assert_same_series(dlrm, analysis, rank)
        for row in open_trace(dlrm).analyze().streams:
            if row.rank == rank:
                stream = int(row.stream.removeprefix("stream-"))
                assert [row.host_wait_us, row.kernel_wait_us, row.other_us] == idle[stream]
                assert row.queue_mean == found[1][stream][1]
                assert row.queue_max == found[1][stream][-1]


def test_random_files_as_by_hta(tmp_path: Path) -> None:
    require_hta()
    first = choose_seed()
    print("first seed:", first)
    for seed in range(first, first + RANDOM_JOBS):
        folder = write_random(tmp_path / f"{seed}", seed)
        assert_agree(figures(folder), figures_of_hta(open_with_hta(folder)))
    for seed in range(first, first + RANDOM_JOBS // 2):
        folder = write_random(tmp_path / f"{seed}-spread", seed, spread=True)
        analysis = open_with_hta(folder)
        assert_agree(figures(folder), figures_of_hta(analysis))
        for rank in range(2):
            assert_same_tables(tables(folder, rank), tables_of_hta(analysis, rank))
            assert_same_series(folder, analysis, rank)


def device_events(name: str, *times: tuple[float, float], **args: float) -> list[dict[str, Any]]:
    """Kernels of stream 7 with these starts and lengths in microseconds."""
    common = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7}
    return [{**common, "ts": ts, "dur": dur, "args": {"stream": 7, **args}} for ts, dur in times]


def host_event(name: str, category: str, ts: float, dur: float, **args: int) -> dict[str, Any]:
    """An event of a thread."""
    where = {"ph": "X", "pid": 9, "tid": 9}
    return {**where, "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}


STEPS = [host_event(f"ProfilerStep#{n}", "user_annotation", 1000 * n, 1000) for n in (1, 2)]
LAUNCH = host_event("cudaLaunchKernel", "cuda_runtime", 1100, 5, correlation=1)
LATE_LAUNCH = host_event("cudaLaunchKernel", "cuda_runtime", 2100, 5, correlation=2)
NCCL = "ncclDevKernel_AllReduce"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param(
            [
                *STEPS,
                LAUNCH,
                LATE_LAUNCH,
                *device_events("gemm", (1200, 10), (2050, 10), correlation=1),
                *device_events("gemm", (2200, 10), correlation=2),
            ],
            (0, 840, 20, 860),
            id="last step dropped",
        ),
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
        pytest.param(
            [*device_events("gemm", (10.4, 5.2), (30.9, 2.0)), *device_events(NCCL, (13.0, 7.9))],
            (100 * 2 / 7, 11, 5, 21),
            id="rounded inwards, to 11-15, 31-32 and 13-20",
        ),
    ],
)
def test_conventions_of_hta(
    tmp_path: Path, events: list[dict[str, Any]], expected: tuple[float, ...]
) -> None:
    write(tmp_path / "a.json", events, distributedInfo={"rank": 0, "world_size": 1})
    assert figures(tmp_path)[0] == pytest.approx(expected)


def test_all_files_of_a_rank_count(tmp_path: Path) -> None:
    for number in range(2):
        events = device_events("gemm", (1000 * number, 10))
        write(tmp_path / f"{number}.json", events, distributedInfo={"rank": 0, "world_size": 1})
    assert figures(tmp_path) == {0: (0, 990, 20, 1010)}


def test_work_shorter_than_a_microsecond_has_no_negative_length(tmp_path: Path) -> None:
    events = device_events("gemm", (10.2, 0.5), (20.0, 5.0))
    assert figures(write(tmp_path / "a.json", events)) == {0: (0, 9, 5, 14)}


def test_report_shows_hta_values_where_they_differ(tmp_path: Path) -> None:
    folder = write_random(tmp_path / "job", 0, least_steps=2)
    expected = figures(folder)
    for rank, ours in figures(folder, "ddltrace").items():
        assert ours[3] > expected[rank][3], "ours keep the last step"
    report = run_analyze(folder, "--definitions", "hta").stdout
    lines = report.partition("Ranks by the definitions of HTA")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.split()[:1] == ["rank"]) + 1
    for line, (rank, (overlap, *others)) in zip(lines[first:], expected.items(), strict=False):
        assert line.split() == [str(rank), f"{overlap:.2f}", *(f"{value:.0f}" for value in others)]
    assert "Works launched and not begun, by HTA" in report


def test_imported_trace_keeps_hta_values(tmp_path: Path) -> None:
    folder = write_random(tmp_path / "job", 1)
    target = tmp_path / "imported"
    done = CliRunner().invoke(import_, [str(folder), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert figures(target) == figures(folder)
    for table in ("hta_queue_length", "hta_copy_bandwidth"):
        assert (expected := series(folder, table, 0))
        assert series(target, table, 0) == expected


def test_without_device_work_there_are_no_values(foreign: Path) -> None:
    rows = document_of(foreign / "kineto-cpu")["ranks"]
    keys = ("overlap_ratio", "idle_us", "compute_us", "span_us")
    assert {row[key] for row in rows for key in keys} == {None}
    report = run_analyze(foreign / "kineto-cpu", "--definitions", "hta").stdout
    assert "no rank has device work" in report


def test_other_traces_and_chosen_steps_are_refused(foreign: Path) -> None:
    native = Path(__file__).resolve().parents[3] / "sample_traces" / "straggler"
    with pytest.raises(UsageError, match="leave out --definitions hta"):
        hta_ranks(open_trace(native))
    command = [str(foreign / "kineto-cpu"), "--definitions", "hta", "--steps", "0:2"]
    result = CliRunner().invoke(analyze, command)
    assert result.exit_code != 0
    assert "leave out --steps" in result.output + str(result.exception)


def test_times_of_queues_count_from_the_first_event_as_rounded(tmp_path: Path) -> None:
    launch = host_event("cudaLaunchKernel", "cuda_runtime", 11.5, 4.0, correlation=1)
    kernel = device_events("gemm", (20.25, 5.0), correlation=1)
    write(tmp_path / "rank-0.json", [launch, *kernel])
    # Both times rounded up: 12 and 21 us.
    assert series(tmp_path, "hta_queue_length", 0) == {(7, 0): 1, (7, 9): 0}


def test_of_calls_at_one_time_the_one_that_launches_is_taken(tmp_path: Path) -> None:
    waits = host_event("cudaStreamSynchronize", "cuda_runtime", 100, 4, correlation=1)
    launch = host_event("cudaLaunchKernel", "cuda_runtime", 100, 4, correlation=2)
    copy = device_events("Memcpy HtoD (Pinned -> Device)", (120, 5), correlation=2)[0]
    write(tmp_path / "rank-0.json", [waits, launch, copy | {"cat": "gpu_memcpy"}])
    assert series(tmp_path, "hta_queue_length", 0) == {(7, 0): 1, (7, 20): 0}


def test_stated_bandwidths_are_kept_and_checked(tmp_path: Path) -> None:
    stated = {"bytes": 1000, "memory bandwidth (GB/s)": 7.5}
    copy = device_events("Memcpy HtoD (Pinned -> Device)", (1200, 10), **stated)[0]
    file = write(tmp_path / "rank-0.json", [copy | {"cat": "gpu_memcpy"}])
    target = tmp_path / "kept"
    done = CliRunner().invoke(import_, [str(file), "-o", str(target)])
    assert done.exit_code == 0, done.output
    kept = {("Memcpy HtoD", 0): 7.5, ("Memcpy HtoD", 10): 0}
    assert series(target, "hta_copy_bandwidth", 0) == kept
    described = target / "run.json"
    run = json.loads(described.read_text())
    run["labels"][BANDWIDTHS_LABEL]["0"] = ["much"]
    described.write_text(json.dumps(run))
    with pytest.raises(TraceError, match="the bandwidths of copies cannot be read"):
        hta_ranks(open_trace(target))


@pytest.mark.parametrize(("ts", "dur"), [(1e300, 1), (5, 1e300), (1e300, 1e300), (-1e300, 2)])
def test_times_beyond_64_bits_are_no_warning(tmp_path: Path, ts: float, dur: float) -> None:
    events = [*device_events("gemm", (100, 10), (ts, dur), correlation=1), LAUNCH]
    path = write(tmp_path / "rank-0.json", events)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with contextlib.suppress(TraceError):
            open_trace(path)
