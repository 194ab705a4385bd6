"""What ``--force`` removes, and what it never does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ddltrace.cli import cli
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.launch.launcher import prepare_directory
from ddltrace.tracer.trace.liveness import pid_namespace
from ddltrace.tracer.trace.removal import is_file_of_trace
from ddltrace.tracer.trace.run_files import read_run_file, write_run, write_sidecar
from ddltrace.tracer.trace.run_info import PARTS_LABEL, RankInfo, RunInfo
from ddltrace.tracer.trace.trace_parts import Part, open_shared_directory

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "sample_traces" / "straggler"
FOREIGN = ("thesis.tex", "rank-notes.txt", "rank-00000-0-1.arrow.bak", ".bashrc", "counters.csv")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    shutil.copytree(SAMPLE, tmp_path / "trace")
    return tmp_path / "trace"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    event = {"ph": "X", "cat": "cpu_op", "name": "x", "pid": 1, "tid": 1, "ts": 1.0, "dur": 1.0}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event]}))
    return path


@pytest.fixture
def other_process() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as process:
        yield process.pid


def run_command(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def add_foreign(folder: Path) -> dict[Path, str]:
    for name in (*FOREIGN, "chapters/one.tex", "part-time/job.txt", "part-00000/own.txt"):
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(name)
    (folder / "chapters" / "rank-00000-0-1.arrow").write_text("mine")
    return {
        path: path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and (path.name in FOREIGN or path.parent != folder)
    }


def test_an_import_removes_only_the_trace(trace: Path, source: Path) -> None:
    kept = add_foreign(trace)
    old = {path.name for path in SAMPLE.glob("rank-*")}
    assert run_command("import", source, "-o", trace).exit_code != 0
    assert run_command("import", source, "-o", trace, "--force").exit_code == 0
    assert {path: path.read_text() for path in kept} == kept
    assert not old & {path.name for path in trace.iterdir()}
    assert read_run_file(trace).source != read_run_file(SAMPLE).source


def test_a_refusal_is_removed_with_its_trace(trace: Path) -> None:
    """Ranks take the file of an earlier run for a sign that one of them has printed the line."""
    (trace / "refused-1.txt").write_text("strategy expert cannot be applied")
    (trace / "refused-job.txt").write_text("mine")
    prepare_directory(trace, force=True)
    assert [path.name for path in trace.glob("refused-*")] == ["refused-job.txt"]


def test_the_parts_of_a_trace_are_removed_with_it(tmp_path: Path, source: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    write_run(whole, RunInfo(labels={PARTS_LABEL: True}))
    shutil.copytree(SAMPLE, whole / "part-00000")
    shutil.copytree(SAMPLE, whole / "part-00001")
    (whole / "part-00001" / "own.txt").write_text("mine")
    assert run_command("import", source, "-o", whole, "--force").exit_code == 0
    assert not (whole / "part-00000").exists()
    assert [path.name for path in (whole / "part-00001").iterdir()] == ["own.txt"]


@pytest.mark.parametrize("content", ["{}", '{"schema": "other/1"}', "no JSON", "[]"])
def test_a_foreign_run_json_makes_no_trace(tmp_path: Path, source: Path, content: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "run.json").write_text(content)
    done = run_command("import", source, "-o", home, "--force")
    assert isinstance(done.exception, UsageError)
    assert "is not a trace" in str(done.exception)
    assert (home / "run.json").read_text() == content


def test_links_in_a_trace_are_removed_not_what_they_lead_to(
    tmp_path: Path, trace: Path, source: Path
) -> None:
    shutil.copytree(SAMPLE, tmp_path / "elsewhere")
    before = sorted(path.name for path in (tmp_path / "elsewhere").iterdir())
    (trace / "part-00000").symlink_to(tmp_path / "elsewhere")
    (trace / "rank-00007-0-1.arrow").symlink_to(tmp_path / "elsewhere" / before[0])
    assert run_command("import", source, "-o", trace, "--force").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == before
    assert not (trace / "rank-00007-0-1.arrow").is_symlink()


def running(pid: int, host: str | None = None) -> RunInfo:
    name = os.uname().nodename if host is None else host
    return RunInfo(host=name, launcher_pid=pid, pid_namespace=pid_namespace())


def test_a_trace_that_is_being_recorded_is_never_removed(
    tmp_path: Path, source: Path, other_process: int
) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    write_run(trace, running(other_process))
    part = tmp_path / "whole" / "part-00000"
    part.mkdir(parents=True)
    write_run(part.parent, RunInfo(labels={PARTS_LABEL: True}))
    write_run(part, running(other_process))
    for folder in (trace, part.parent):
        for force in ([], ["--force"]):
            done = run_command("import", source, "-o", folder, *force)
            assert isinstance(done.exception, UsageError), done.output
        assert str(other_process) in str(done.exception)
    with pytest.raises(UsageError, match=str(other_process)):
        open_shared_directory(part.parent, Part("00000", None), force=True)
    with pytest.raises(UsageError, match="exists"):
        open_shared_directory(part.parent, Part("00000", None), force=False)
    assert read_run_file(part).launcher_pid == other_process


def test_ranks_that_outlive_their_launcher_keep_the_trace(
    tmp_path: Path, other_process: int
) -> None:
    write_run(tmp_path, running(2**22 + 1))
    host, space = os.uname().nodename, pid_namespace()
    info = RankInfo(rank=0, segment=f"rank-00000-0-{other_process}", pid=other_process)
    info.host, info.pid_namespace = host, space
    write_sidecar(tmp_path, info)
    with pytest.raises(UsageError, match=f"rank 0 is process {other_process}"):
        prepare_directory(tmp_path, force=True)


def test_the_process_id_of_another_program_does_not_keep_a_trace(
    tmp_path: Path, other_process: int
) -> None:
    write_run(tmp_path, running(other_process))
    os.utime(tmp_path / "run.json", (time.time() - 3600,) * 2)
    prepare_directory(tmp_path, force=True)


def test_a_job_on_another_host_is_over_when_nothing_was_written_for_long(tmp_path: Path) -> None:
    write_run(tmp_path, running(1, host="elsewhere"))
    with pytest.raises(UsageError, match="elsewhere"):
        prepare_directory(tmp_path, force=True)
    os.utime(tmp_path / "run.json", (time.time() - 3600,) * 2)
    prepare_directory(tmp_path, force=True)


def test_a_trace_without_events_is_replaced_without_force(tmp_path: Path, source: Path) -> None:
    empty = tmp_path / "x"
    empty.mkdir()
    write_run(empty, RunInfo(status="partial", exit_status=0, notes=["nothing was recorded"]))
    (empty / "notes.txt").write_text("mine")
    assert run_command("import", source, "-o", empty).exit_code == 0
    assert read_run_file(empty).ranks
    assert (empty / "notes.txt").exists()
    done = run_command("import", source, "-o", empty)
    assert isinstance(done.exception, UsageError)
    assert "exists" in str(done.exception)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert isinstance(run_command("import", source, "-o", folder).exception, UsageError)


def test_the_output_of_a_merge_may_not_hold_its_sources(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    write_run(whole, RunInfo(labels={PARTS_LABEL: True}))
    shutil.copytree(SAMPLE, whole / "part-00000")
    for command in ("merge", "collect"):
        done = run_command(command, whole / "part-00000", "-o", whole, "--force")
        assert isinstance(done.exception, UsageError), done.output
        assert "choose another" in str(done.exception)
    assert (whole / "part-00000" / "run.json").exists()


def test_an_experiment_removes_only_its_own_files(tmp_path: Path) -> None:
    pytest.importorskip("msgspec")
    from ddltrace.experiments.harness.runner import is_experiment, remove_experiment

    folder = tmp_path / "experiment"
    shutil.copytree(ROOT / "sample_traces" / "experiment-400mbit", folder)
    (folder / "ddp.log").write_text("log")
    shutil.copytree(SAMPLE, folder / "my-trace")
    for name in ("thesis.tex", "my.log", "ddp/figure.svg"):
        (folder / name).write_text("mine")
    assert is_experiment(folder)
    remove_experiment(folder)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == {
        *("thesis.tex", "my.log", "ddp", "ddp/figure.svg", "my-trace"),
        *(f"my-trace/{path.name}" for path in SAMPLE.iterdir()),
    }
    assert not is_experiment(folder)


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        *((path.name, True) for path in SAMPLE.iterdir()),
        *((f"part-7/{path.name}", True) for path in SAMPLE.iterdir()),
        *((name, False) for name in FOREIGN),
        (".run.json.reserve", True),
        (".run.json.123.tmp", True),
        ("chapters/run.json", False),
        ("part-1/part-2/run.json", False),
        ("run.json.old", False),
    ],
)
def test_names_of_files_of_a_trace(name: str, is_own: bool) -> None:
    assert is_file_of_trace(name) is is_own


def test_reports_and_exports_replace_no_file_without_force(tmp_path: Path, trace: Path) -> None:
    for command in (
        ["analyze", trace, "--html"],
        ["experiment", "compare", trace, "--html"],
        ["export", trace, "--to", "csv", "-o"],
        ["export", trace, "--to", "chrome", "-o"],
    ):
        file = tmp_path / "thesis.html"
        file.write_text("mine")
        done = run_command(*command, file)
        assert isinstance(done.exception, UsageError)
        assert f"{file} exists" in str(done.exception)
        assert file.read_text() == "mine"
        assert run_command(*command, file, "--force").exit_code == 0
        assert file.read_text() != "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"trace", "thesis.html"}


def test_an_output_is_not_written_through_a_link(tmp_path: Path, trace: Path) -> None:
    """Names of temporary files can be guessed by whoever may write to the same folder."""
    own = tmp_path / "own.txt"
    own.write_text("mine")
    for name in (f".x.html.{os.getpid()}.tmp", ".partial-x.csv"):
        (tmp_path / name).symlink_to(own)
    assert run_command("analyze", trace, "--html", tmp_path / "x.html").exit_code == 0
    assert run_command("export", trace, "--to", "csv", "-o", tmp_path / "x.csv").exit_code == 0
    assert own.read_text() == "mine"
