"""Rounds, failures and resuming, with jobs that copy a real trace in place of training."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from ddltrace.experiments.harness import html_report, job_process, runner
from ddltrace.experiments.harness.file_names import ARROW_FILE, RESULTS_FILE
from ddltrace.experiments.harness.job_command import job_command, read_also
from ddltrace.experiments.harness.job_process import Interrupted
from ddltrace.experiments.harness.results import Results, Run
from ddltrace.experiments.harness.results_file import load
from ddltrace.experiments.harness.results_table import render
from ddltrace.experiments.harness.settings import PlannedRun, Settings, plan_runs
from ddltrace.experiments.observation.peak_memory import RankMemory
from ddltrace.tracer.errors import TraceError, UsageError

SAMPLE = Path(__file__).resolve().parents[2] / "sample_traces" / "ddp-4-hosts-400mbit"
STEPS, WARMUP = 40, 10
SETTINGS = Settings(
    strategies=["ddp", "fifo", "wfbp"],
    workload="digits",
    width=48,
    ranks=4,
    steps=STEPS,
    warmup=WARMUP,
    repeats=2,
    seed=7,
    timeout_s=60,
    target_loss=1.0,
)
JOB = """
import json, shutil, sys
source, trace, outcome, seed = sys.argv[1:]
shutil.copytree(source, trace, dirs_exist_ok=True)
losses = [3.0 - 0.1 * step for step in range(40)]
outcome_of = {
    "losses": losses, "train_loss": losses[-1] + int(seed), "wire_bytes_per_step": [1.0, 3.0],
    "peak_memory_bytes": [5, 9], "replicas_identical": True, "torch": "2", "gradient_bytes": 4,
}
json.dump(outcome_of, open(outcome, "w"))
"""


class Heard(runner.ProgressBar):
    """Progress that is written down."""

    def __init__(self) -> None:
        super().__init__(0)
        self.started: list[tuple[str, int, int]] = []
        self.ended: list[str] = []

    def start(self, planned: PlannedRun) -> None:
        self.started.append((planned.strategy, planned.round, planned.seed))

    def end(self, run: Run) -> None:
        self.ended.append(run.status)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], str]:
    """Scripts that take the place of some runs' jobs, by strategy and round."""
    scripts: dict[tuple[str, int], str] = {}

    def command(planned: PlannedRun, settings: Settings, directory: Path) -> list[str]:
        script = scripts.get((planned.strategy, planned.round), JOB)
        trace, outcome = directory / planned.name, runner.outcome_path(planned, directory)
        return [sys.executable, "-c", script, *map(str, (SAMPLE, trace, outcome, planned.seed))]

    monkeypatch.setattr(runner, "job_command", command)
    return scripts


def test_each_round_runs_every_strategy_with_its_own_seed() -> None:
    planned = plan_runs(replace(SETTINGS, repeats=3))
    assert [(run.strategy, run.round, run.seed) for run in planned] == [
        *(("ddp", 1, 7), ("fifo", 1, 7), ("wfbp", 1, 7)),
        *(("fifo", 2, 8), ("wfbp", 2, 8), ("ddp", 2, 8)),
        *(("wfbp", 3, 9), ("ddp", 3, 9), ("fifo", 3, 9)),
    ]
    assert [run.name for run in planned[:4]] == ["ddp", "fifo", "wfbp", "fifo.r2"]


def test_directories_of_similar_specs_differ() -> None:
    specs = ["a:b=1", "a+b=1", "a-b-1"]
    names = {run.name for run in plan_runs(replace(SETTINGS, strategies=specs, repeats=1))}
    assert len(names) == 3


def test_rounds_are_added_until_it_is_decided_or_the_time_is_up(
    broken: dict[tuple[str, int], str], tmp_path: Path
) -> None:
    """All runs copy the same trace, so after two rounds nothing is left to decide."""
    own = replace(SETTINGS, strategies=["ddp", "fifo"], repeats=1)
    for name, minutes, rounds in (("until", 10.0, 3), ("up", 1e-9, 1)):
        folder = tmp_path / name
        folder.mkdir()
        results = runner.run_experiment(replace(own, max_minutes=minutes), folder)
        assert [len(row.runs) for row in results.rows] == [rounds, rounds]
        assert load(folder).settings["repeats"] == rounds
        assert results.status == "complete"
        assert results.progress["total"] == 2 * rounds


class Others:
    """The cores that other processes keep busy: one number for each time that it is asked."""

    def __init__(self, means: list[float]) -> None:
        self._means = means

    def __call__(self) -> Others:
        return self

    def mean(self) -> float:
        return self._means.pop(0)


def test_a_disturbed_run_is_made_again_when_the_machine_is_quiet(
    broken: dict[tuple[str, int], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(SETTINGS, strategies=["ddp", "fifo"], repeats=1, max_other_cores=0.2)
    monkeypatch.setattr(runner, "_LOOK_S", 0.0)
    for name, means, made, disturbed in (
        # Both runs of the round; then, for a disturbed one, the machine and the run again.
        ("quiet", [0.67, 0.2, 0.0, 0.1], ["ddp", "fifo", "ddp"], [[], []]),
        ("busy", [0.67, 0.0, 0.5], ["ddp", "fifo"], [[1], []]),
        ("again", [0.1, 0.67, 0.0, 0.9], ["ddp", "fifo", "fifo"], [[], [1]]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        heard = Heard()
        monkeypatch.setattr(runner, "ProgressBar", lambda _, bar=heard: bar)
        monkeypatch.setattr(runner, "OtherCores", Others(means))
        runner.run_experiment(own, folder)
        results = load(folder)
        assert [strategy for strategy, *_ in heard.started] == made
        assert [row.disturbed for row in results.rows] == disturbed
        assert means == []
        assert [len(row.runs) for row in results.rows] == [1, 1]
        text = render(results)
        assert ("(disturbed)" in text) == (disturbed != [[], []])
        if name == "again":
            assert "up to 0.90 cores busy (round 1); do not trust its times" in text
            page = html_report.render(results, folder)
            assert page.count("fifo (disturbed)") >= 2


def test_own_settings_are_rows_with_their_own_command(tmp_path: Path) -> None:
    also = read_also(["big=python train.py --bucket 100"], ["unchanged"])
    settings = Settings(["unchanged", "big"], None, 20, 5, command=["python", "a.py"], also=also)
    commands = [job_command(run, settings, tmp_path) for run in plan_runs(settings)]
    assert [command[command.index("--") + 1 :] for command in commands] == [
        ["python", "a.py"],
        ["python", "train.py", "--bucket", "100"],
    ]
    assert not any("--strategy" in command for command in commands)
    for text in ("big", "=x", "a b=x", "big=", "ddp=x", "unchanged=x", 'big="x'):
        with pytest.raises(UsageError, match="--also"):
            read_also([text], ["unchanged"])


def test_runs_become_rows_json_and_arrow(
    broken: dict[tuple[str, int], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    monkeypatch.setattr(runner, "ProgressBar", lambda _, bar=heard: bar)
    results = runner.run_experiment(SETTINGS, tmp_path)
    assert results.status == "complete"
    assert heard.ended == ["complete"] * 6
    assert load(tmp_path) == results
    (ddp, fifo, _) = results.rows
    assert [(run.round, run.seed, run.trace) for run in fifo.runs] == [
        (1, 7, "fifo"),
        (2, 8, "fifo.r2"),
    ]
    assert len(ddp.step_us) == 2 * (STEPS - WARMUP)
    assert ddp.train_loss == pytest.approx(-0.9 + 7.5)
    assert (ddp.wire_bytes, ddp.peak_memory_bytes) == (2.0, 9)
    # The mean of the losses 1.2, 1.1, ..., 0.8 of steps 18 to 22 is 1.
    assert ddp.time_to_loss_us == pytest.approx(ddp.runs[0].elapsed_us[22])
    value = json.loads((tmp_path / RESULTS_FILE).read_text())
    assert value["plain"] == "fifo"
    assert value["tuned_ddp"] == "ddp"
    assert value["progress"] == {"done": 6, "total": 6, "running": None}
    table = pa.ipc.open_file(str(tmp_path / ARROW_FILE)).read_all()
    assert table.num_rows == 6 * STEPS
    steps = table.to_pandas()
    one = steps[(steps.strategy == "wfbp") & (steps["round"] == 2)]
    assert list(one.step) == list(range(STEPS))
    assert list(one.steady) == [False] * WARMUP + [True] * (STEPS - WARMUP)
    assert list(one.wall_us[WARMUP:]) == results.rows[2].runs[1].step_us
    assert one.wall_us[:WARMUP].isna().all()
    assert list(one.elapsed_us) == sorted(one.elapsed_us)


def test_failures_are_rows_and_the_others_go_on(
    broken: dict[tuple[str, int], str], tmp_path: Path
) -> None:
    broken["ddp", 1] = "raise RuntimeError('out of tea')"
    broken["fifo", 2] = "import time; print('waiting'); time.sleep(600)"
    broken["wfbp", 1] = JOB.replace("3.0 - 0.1 * step", "2.0 if step < 5 else float('nan')")
    settings = replace(SETTINGS, timeout_s=5)
    results = runner.run_experiment(settings, tmp_path)
    assert results.status == "failed"
    ddp, fifo, wfbp = results.rows
    assert (ddp.status, fifo.status, wfbp.status) == ("failed", "hung", "diverged")
    assert ddp.reason == "round 1: the job ended with exit status 1: RuntimeError: out of tea " + (
        "(log: ddp.log)"
    )
    assert fifo.reason == "round 2: no end after 5 s (--timeout); log: fifo.r2.log"
    assert wfbp.reason == "round 1: the training diverged: the loss of step 5 is nan"
    assert wfbp.runs[0].losses[5] is None
    # Values come from the runs that were measured.
    assert len(ddp.step_us) == STEPS - WARMUP
    assert set(ddp.timed.rounds) == {2}


def test_a_killed_rank_is_the_reason_and_not_what_the_others_say_of_it(
    broken: dict[tuple[str, int], str], tmp_path: Path
) -> None:
    broken["ddp", 1] = """if True:
        print("ddltrace: note: rank 1 ended without closing its trace: killed by SIGKILL")
        raise RuntimeError("connection closed by peer")
    """
    settings = replace(SETTINGS, strategies=["ddp"], repeats=1)
    (row,) = runner.run_experiment(settings, tmp_path).rows
    assert row.reason == (
        "the job ended with exit status 1: rank 1 ended without closing its trace: "
        "killed by SIGKILL (log: ddp.log)"
    )


@pytest.mark.parametrize(
    ("own", "closing"),
    [
        (
            "the emulated network is off by more than 5%: host2 to host3",
            "ddltrace: nothing was recorded: no process called init_process_group",
        ),
        (
            "strategy dgc cannot be applied: the job uses AdamW",
            "ddltrace: trace of 4 ranks in dgc\nddltrace: next: ddltrace analyze dgc",
        ),
    ],
    ids=["network", "refused"],
)
def test_the_reason_is_the_jobs_message_and_not_the_launchers_last_line(
    broken: dict[tuple[str, int], str], tmp_path: Path, own: str, closing: str
) -> None:
    broken["ddp", 1] = f"""import sys
print("ddltrace: {own}")
sys.exit({closing!r})
"""
    settings = replace(SETTINGS, strategies=["ddp"], repeats=1)
    (row,) = runner.run_experiment(settings, tmp_path).rows
    assert row.reason == f"the job ended with exit status 1: ddltrace: {own} (log: ddp.log)"


def test_a_trace_without_steps_is_explained_by_the_tracers_note(
    broken: dict[tuple[str, int], str], tmp_path: Path
) -> None:
    broken["ddp", 1] = (
        JOB
        + """
print("ddltrace: note: rank 0: 7 events dropped: buffer or disk full")
"""
    )
    settings = replace(SETTINGS, strategies=["ddp"], repeats=1, steps=90, warmup=60)
    (row,) = runner.run_experiment(settings, tmp_path).rows
    assert row.status == "failed"
    assert row.reason == (
        "its trace cannot be measured: ddp has steps 0 to 39, none of 60:90; "
        "rank 0: 7 events dropped: buffer or disk full"
    )


@pytest.mark.parametrize(
    ("later", "others_worked"),
    [
        ("cpu 100 0 100 900 5 0 0 0 0 0", False),
        ("cpu 100 0 100 999900 999905 0 0 0 9999 0", False),  # idle, and guests' time twice
        ("cpu 99100 0 100 900 5 0 0 0 0 0", True),
        ("cpu 100 0 100 900 5 0 0 99000 0 0", True),  # taken by other virtual machines
    ],
)
def test_the_work_of_other_processes_is_measured(
    later: str, others_worked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 100 0 100 900 5 0 0 0 0 0\n")
    monkeypatch.setattr(job_process, "_STAT", stat)
    others = job_process.OtherCores()
    stat.write_text(later + "\n")
    mean = others.mean()
    assert mean is not None
    assert (mean > 0) == others_worked
    stat.unlink()
    assert others.mean() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("when", ["start", "end"])
def test_a_signal_is_not_lost_where_python_ignores_exceptions(
    broken: dict[tuple[str, int], str], tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):  # Python calls handlers between instructions
                pass

    class Signalled(Heard):
        def start(self, planned: PlannedRun) -> None:
            super().start(planned)
            if when == "start":
                Finalized()

        def end(self, run: Run) -> None:
            super().end(run)
            if when == "end" and len(self.ended) == 6:
                Finalized()

    heard = Signalled()
    monkeypatch.setattr(runner, "ProgressBar", lambda _, bar=heard: bar)
    with pytest.raises(Interrupted):
        runner.run_experiment(SETTINGS, tmp_path)
    assert len(heard.ended) == (0 if when == "start" else 6)
    assert json.loads((tmp_path / RESULTS_FILE).read_text())["status"] == "interrupted"


def test_resume_makes_what_is_missing_and_keeps_the_rest(
    broken: dict[tuple[str, int], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken["fifo", 1] = "raise SystemExit(3)"
    runner.run_experiment(SETTINGS, tmp_path)
    value = json.loads((tmp_path / RESULTS_FILE).read_text())
    del value["rows"][2]["runs"][1]  # as if it had been interrupted there
    (tmp_path / RESULTS_FILE).write_text(json.dumps(value))
    shutil.rmtree(tmp_path / "wfbp.r2")
    broken.clear()
    heard = Heard()
    monkeypatch.setattr(runner, "ProgressBar", lambda _, bar=heard: bar)
    results = runner.resume_experiment(tmp_path)
    assert heard.started == [("fifo", 1, 7), ("wfbp", 2, 8)]
    assert results.status == "complete"
    assert [len(row.runs) for row in results.rows] == [2, 2, 2]
    assert isinstance(load(tmp_path), Results)
    heard = Heard()
    monkeypatch.setattr(runner, "ProgressBar", lambda _, bar=heard: bar)
    assert runner.resume_experiment(tmp_path).status == "complete"
    assert not heard.started


@pytest.mark.usefixtures("broken")
def test_no_second_one_runs_in_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    class Repeated(Heard):
        def start(self, planned: PlannedRun) -> None:
            super().start(planned)
            for second in (runner.resume_experiment, runner.remove_experiment):
                with pytest.raises(UsageError, match="an experiment is running in") as error:
                    second(tmp_path)
                refused.append(str(error.value))

    heard = Repeated()
    monkeypatch.setattr(runner, "ProgressBar", lambda _, bar=heard: bar)
    assert runner.run_experiment(SETTINGS, tmp_path).status == "complete"
    assert len(refused) == 2 * 6
    runner.remove_experiment(tmp_path)
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("settings", [{}, {"strategies": 3}, {"strategies": ["ddp"], "steps": "x"}])
def test_settings_that_cannot_be_run_are_refused(settings: object, tmp_path: Path) -> None:
    value = Results(settings=settings).to_json()  # type: ignore[arg-type]
    (tmp_path / RESULTS_FILE).write_text(json.dumps(value))
    with pytest.raises(TraceError, match="cannot be resumed"):
        runner.resume_experiment(tmp_path)


def test_all_steps_cannot_be_warmup() -> None:
    with pytest.raises(UsageError, match="leaves nothing"):
        replace(SETTINGS, steps=10)


def test_the_memory_of_ranks_is_watched_from_outside(tmp_path: Path) -> None:
    (tmp_path / f"rank-00000-0-{os.getpid()}.arrows").touch()
    (tmp_path / "rank-00001-0-999999999.arrows").touch()  # no such process
    memory = RankMemory(tmp_path)
    memory.sample()
    assert set(memory.peaks) == {os.getpid()}
    assert memory.peaks[os.getpid()] >= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 512


def test_the_rank_that_failed_first_is_the_reason(
    broken: dict[tuple[str, int], str], tmp_path: Path
) -> None:
    """Of the sample's ranks, which print in another order than that in which they ended."""
    broken["ddp", 1] = """import shutil, sys
from pathlib import Path
from ddltrace.tracer.trace.run_files import read_run_file, write_run
shutil.copytree(sys.argv[1], sys.argv[2])
run = read_run_file(Path(sys.argv[2]))
for info in run.ranks:
    info.ended_ns, info.exit_status = 1000 - info.rank, 1
write_run(Path(sys.argv[2]), run)
last = max(info.rank for info in run.ranks)
print(f"[rank{last}]: ValueError: the cause")
print("[rank0]: RuntimeError: Connection closed by peer")
print("[rank0]:[W1126 13:00:00.1 TCPStore.cpp:1] recvValue failed: SocketError: Broken pipe")
print("W1126 13:00:00.1 torch/distributed/c10d_logger.py:1] Warning: Error: unrelated")
sys.exit(1)
"""
    settings = replace(SETTINGS, strategies=["ddp"], repeats=1)
    (row,) = runner.run_experiment(settings, tmp_path).rows
    assert "ValueError: the cause" in row.reason
