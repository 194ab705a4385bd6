"""What a job's time goes to (`ddltrace.analyzer.measures.goodput`)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pytest

from ddltrace.analyzer.analysis import analyze
from ddltrace.analyzer.events.event_columns import Columns
from ddltrace.analyzer.live.live_goodput import ProcessTime, Seen, live_shares
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.query.sql import run_query
from ddltrace.analyzer.report.text_report import render_report
from ddltrace.analyzer.trace.align import RankClock
from ddltrace.tracer.trace.finalize import finalize
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo
from ddltrace.tracer.trace.trace_files import segment_name

from .conftest import RankBuilder, events_batch, write_segment

TRACES = sorted(
    path.parent for path in (Path(__file__).parents[3] / "sample_traces").glob("**/run.json")
)
MS = 1_000_000
FILE = " file=1:7"


class Job:
    """A job whose launcher starts at 0; all times are milliseconds."""

    def __init__(self, path: Path, *, took: int, exit_status: int = 0) -> None:
        self.path = path
        self.run = RunInfo(
            host="here",
            created_unix_ns=0,
            ended_unix_ns=took * MS,
            exit_status=exit_status,
        )
        self.processes: list[tuple[RankInfo, RankBuilder]] = []
        self.ends: dict[str, tuple[int, int | None]] = {}

    def process(self, rank: int, attempt: int, began: int, ended: int, status: int = 0, **more):
        name = segment_name(rank=rank, attempt=attempt, pid=100 * attempt + rank)
        info = RankInfo(
            rank,
            name,
            world_size=2,
            attempt=attempt,
            host="here",
            clock_domain="boot",
            status="killed" if status else "complete",
            clock={"monotonic_ns": began * MS, "unix_ns": began * MS},
            checkpoints=True,
        )
        for key, value in more.items():
            setattr(info, key, value)
        events = RankBuilder(rank)
        self.processes.append((info, events))
        self.ends[name] = ended * MS, status
        return Events(events)

    def trace(self):
        self.path.mkdir()
        for info, events in self.processes:
            write_segment(self.path, info, events.rows)
        write_run(self.path, self.run)
        finalize(self.path, self.run, self.ends)
        return open_trace(self.path)

    def parts(self):
        """Goodput, and its shares in milliseconds, without those that are 0."""
        goodput = analyze(self.trace()).goodput
        shares = asdict(goodput.shares)
        assert sum(share or 0 for share in shares.values()) == pytest.approx(1)
        times = {name: share and share * goodput.wall_us / 1000 for name, share in shares.items()}
        return goodput, {name: ms for name, ms in times.items() if ms != 0}


class Events:
    """Records the events of a process; all times are milliseconds."""

    def __init__(self, events: RankBuilder) -> None:
        self.events = events

    def steps(self, *numbers: int, start: int, each: int) -> None:
        for place, number in enumerate(numbers):
            begin = 1000.0 * (start + place * each)
            self.events.whole_step(number, begin, begin + 1000.0 * each)

    def region(self, name: str, start: int, end: int, **more) -> None:
        self.events.add("marker", 1000.0 * start, 1000.0 * end, name=name, **more)


@pytest.fixture
def job(tmp_path):
    return lambda **options: Job(tmp_path / "trace", **options)


def restarted(job, *, loads: str):
    """Attempt 0 saves after step 2 of 4 and dies at 190, attempt 1 repeats two steps."""
    job = job(took=700)
    for rank in range(2):
        events = job.process(rank, 0, began=50, ended=190 + rank, status=9)
        events.steps(0, 1, start=100 + rank, each=10)
        if rank == 0:
            events.region(f"checkpoint save{FILE}", 130, 145, step=2)
        events.steps(2, 3, start=120 + rank, each=30)
        events = job.process(rank, 1, began=250, ended=650)
        events.region(f"checkpoint load{loads}", 260, 270)
        events.steps(0, 1, 2, start=300 + rank, each=50)
        events.region("evaluation", 500, 550 + rank)
    return job


def test_time_by_part_over_a_restart(job):
    goodput, parts = restarted(job, loads=FILE).parts()
    assert (goodput.wall_us, goodput.whole_job) == (700_000, True)
    assert (goodput.restarts, goodput.lost_steps) == (1, 2)
    assert parts == pytest.approx(
        {
            "start": 100,
            "checkpoint": 15,
            "training": 81 - 15 + 50,
            # From the first death on, with the two steps that rank 1 repeats last.
            "restart": 300 - 190 + 101,
            "evaluation": 51,
            "other": 190 - 181 + 500 - 451 + 700 - 551,
        }
    )


@pytest.mark.parametrize("loads", ["", " file=1:8"])
def test_steps_are_not_said_to_be_repeated_if_the_checkpoint_is_not_known(job, loads):
    goodput, parts = restarted(job, loads=loads).parts()
    assert (goodput.restarts, goodput.lost_steps) == (1, None)
    assert parts["restart"] == pytest.approx(300 - 190)
    assert parts["training"] == pytest.approx(81 - 15 + 151)


def test_an_update_counts_although_its_step_was_not_recorded(job):
    job = restarted(job, loads=FILE)
    _, events = job.processes[2]  # of rank 1
    events.add("phase", 181_000, 182_000, name="optimizer", step=4)
    goodput, parts = job.parts()
    assert goodput.lost_steps == 3
    assert parts["restart"] == pytest.approx(300 - 190 + 151)


def test_what_does_not_hold_up_training_is_not_lost(job):
    job = job(took=500)
    events = job.process(0, 0, began=0, ended=500)
    events.steps(0, 1, start=100, each=200)
    events.region("checkpoint save async", 150, 160, step=0)
    events.region(f"checkpoint write{FILE}", 150, 290, step=0, lane="thread-1")
    events.region("checkpoint save file=1:8", 200, 250, step=0, lane="thread-2")
    events.region("checkpoint load file=1:9", 300, 310, step=1)  # data
    events.region(f"checkpoint load{FILE}", 310, 330, step=1)
    _, parts = job.parts()
    assert parts == pytest.approx({"start": 100, "training": 370, "checkpoint": 30})


@pytest.mark.parametrize("resumes", [False, True])
def test_a_silence_of_all_ranks_until_the_end_is_a_hang(job, resumes):
    job = job(took=9000, exit_status=1)
    for rank in range(2):
        silence = {
            "since_ns": (2000 + 100 * rank) * MS,
            "noticed_ns": 4500 * MS,
            "step": 2,
            "phase": "backward",
            "stack": ["train.py:1 main"],
        }
        events = job.process(rank, 0, began=500, ended=8000, status=134, silence=silence)
        events.steps(0, 1, start=1000, each=400)
        if resumes and rank:
            events.region("mine", 5000, 5001)
    _, parts = job.parts()
    hang = {} if resumes else {"hang": 8000 - 2100}
    other = 9000 - 1800 - sum(hang.values())
    assert parts == pytest.approx({"start": 1000, "training": 800, **hang, "other": other})


def test_what_was_not_recorded_is_no_part(job):
    job = job(took=1000)
    windows = [
        {"first": 0, "stop": 0, "level": "layer"},
        {"first": 5, "stop": 7, "level": "layer"},
        {"first": 12, "stop": 13, "level": "layer"},
    ]
    events = job.process(0, 0, began=100, ended=950, windows=windows)
    events.steps(5, 6, start=300, each=50)
    events.steps(12, start=700, each=50)
    goodput, parts = job.parts()
    assert parts == pytest.approx(
        {"start": 100, "training": 150, "unrecorded": 200 + 300 + 200, "other": 50}
    )
    assert goodput.lost_steps == 0


def live(job, *, end: int) -> dict[str, float]:
    """The shares of a job as its live metrics have them, without those that are 0."""
    attempts: dict[int, list[Seen]] = {}
    for info, events in job.processes:
        time = ProcessTime(info.clock["monotonic_ns"])
        half = len(events.rows) // 2
        for rows in (events.rows[:half], events.rows[half:]):
            time.add(Columns(pa.Table.from_batches([events_batch(rows)])))
        ended_ns, status = job.ends[info.segment]
        seen = time.seen(RankClock(info.rank))._replace(
            failed_ns=ended_ns if status else None, is_off=info.is_off
        )
        attempts.setdefault(info.attempt, []).append(seen)
    shares = live_shares([attempts[key] for key in sorted(attempts)], 0, end * MS)
    assert sum(shares.values()) == pytest.approx(1)
    return {name: share * end for name, share in shares.items() if share}


def test_live_metrics_are_the_same_without_repeated_steps(job):
    job = restarted(job, loads="")
    assert live(job, end=700) == pytest.approx(job.parts()[1])


def test_live_metrics_of_what_was_not_recorded(job):
    job = job(took=1000)
    windows = [{"first": 0, "stop": 0}, {"first": 5, "stop": 7}]
    events = job.process(0, 0, began=100, ended=1000, windows=windows)
    events.steps(5, 6, start=300, each=50)
    expected = {"start": 100, "training": 100, "unrecorded": 200 + 600}
    assert live(job, end=1000) == pytest.approx(expected)


def test_a_job_without_steps_has_no_live_shares():
    assert live_shares([[ProcessTime(0).seen(RankClock(0))]], 0, MS) == {}


def test_live_silence_is_a_hang():
    time = ProcessTime(0)
    rows = [{"start_ns": MS, "end_ns": 2 * MS, "kind": "step", "name": "step", "step": 0}]
    time.add(Columns(pa.Table.from_batches([events_batch(rows)])))
    seen = time.seen(RankClock(0))._replace(silent_ns=2 * MS)
    shares = live_shares([[seen]], 0, 4 * MS)
    assert (shares["start"], shares["training"], shares["hang"]) == (0.25, 0.25, 0.5)


def test_without_a_launcher_it_is_the_recorded_time(build):
    built = build(1)
    built[0].whole_step(0, 1000.0, 2000.0)
    built[0].add("marker", 500.0, 600.0, name="mine")
    built[0].add("marker", 2000.0, 2250.0, name="evaluation")
    goodput = analyze(built.trace()).goodput
    assert (goodput.wall_us, goodput.whole_job) == (1750, False)
    shares = goodput.shares
    assert (shares.start, shares.training, shares.other) == pytest.approx((2 / 7, 4 / 7, 0))
    # The rank does not say that such regions were recorded.
    assert shares.checkpoint is shares.evaluation is None


def test_some_steps_are_not_the_job(job):
    trace = restarted(job, loads=FILE).trace()
    assert analyze(trace, range(2)).goodput is None


def test_ranges_of_steps_give_the_same(job):
    trace = restarted(job, loads=FILE).trace()
    at_once = analyze(trace).goodput
    trace = open_trace(trace.path)
    trace.memory_limit = 1
    analysis = analyze(trace)
    assert "ranges" in " ".join(analysis.trace.notes)
    assert analysis.goodput == at_once


def test_the_report_and_sql_have_it(job):
    trace = restarted(job, loads=FILE).trace()
    text = render_report(analyze(trace))
    assert "took 700 ms from the launcher's start to its end, with 1 restart; 2 steps were" in text
    assert "  evaluation    51.0 ms    7.3 %  ###" in text
    (row,) = run_query(trace, "SELECT wall_us, lost_steps, share_start FROM goodput").to_pylist()
    assert row == {"wall_us": 700_000.0, "lost_steps": 2, "share_start": pytest.approx(1 / 7)}


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_parts_sum_to_the_whole(path):
    goodput = analyze(open_trace(path)).goodput
    shares = asdict(goodput.shares).values()
    assert sum(filter(None, shares)) == pytest.approx(1)
    assert min(filter(None, shares)) >= 0
    assert goodput.whole_job
