"""Analyses on a Dask cluster: the same numbers as in one process, and one line for each fault."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from support import simulated
from support.jobs import environment, free_port

from ddltrace.analyzer.commands import analyze
from ddltrace.analyzer.engine import dask_engine, dask_worker
from ddltrace.analyzer.engine.dask_engine import DaskEngine, open_dask
from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.analyzer.trace.windows import with_window
from ddltrace.dashboard.stored.cache import FOLDER
from ddltrace.dashboard.stored.stored_trace import Stored
from ddltrace.tracer.errors import EngineError, MissingCapabilityError, UsageError
from ddltrace.tracer.trace.trace_files import RUN_FILE

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = sorted(path.parent for path in (ROOT / "sample_traces").rglob(RUN_FILE))
FOREIGN = [ROOT / "tests" / "data" / "foreign" / "kineto-cpu"]

distributed = pytest.importorskip("distributed")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Ends clients that failed to connect: at a later time, they may end in the middle of a start
    of another client, and wait for its lock for ever."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def cluster() -> Iterator[DaskEngine]:
    with open_dask(workers=2, memory_limit="800MB") as engine:
        yield engine


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of 1,024 ranks."""
    shape = simulated.synthetic().Shape(ranks=1024, steps=2, layers=20, buckets=2)
    return simulated.synthetic().write_trace(tmp_path_factory.mktemp("wide") / "trace", shape)


def document(trace: Trace, steps: range | None = None) -> str:
    return json.dumps(trace.analyze(steps).to_json(), allow_nan=False)


def on(engine: DaskEngine, path: Path) -> Trace:
    return open_trace(path, engine)


def assert_equal(engine: DaskEngine, path: Path) -> None:
    assert document(on(engine, path)) == document(open_trace(path))


@pytest.mark.parametrize("path", SAMPLES + FOREIGN, ids=lambda path: path.name)
@pytest.mark.long
def test_a_trace_has_the_same_analysis(cluster, path):
    assert_equal(cluster, path)


def test_64_ranks_have_the_same_analysis(cluster, tmp_path):
    shape = simulated.synthetic().Shape(ranks=64, steps=6, layers=40, buckets=4, straggler=9)
    assert_equal(cluster, simulated.synthetic().write_trace(tmp_path / "trace", shape))


def in_ranges(path: Path, engine: DaskEngine | None = None) -> Trace:
    """A trace whose memory limit divides it into ranges of about two steps."""
    trace = open_trace(path, engine)
    trace.memory_limit = 1
    selection = trace.step_selection
    assert selection is not None
    trace = open_trace(path, engine)
    trace.memory_limit = int(8 * selection.sizes.mean())
    return trace


@pytest.mark.parametrize("path", [*SAMPLES[:2], *FOREIGN], ids=lambda path: path.name)
@pytest.mark.long
def test_ranges_of_steps_have_the_same_analysis(cluster, path):
    assert document(in_ranges(path, cluster)) == document(in_ranges(path))


def test_a_folder_of_kineto_files_is_imported_the_same(cluster):
    one, other = formats.read(FOREIGN[0]), formats.read(FOREIGN[0], cluster)
    assert one.run == other.run
    assert one.tables == other.tables


@pytest.mark.long
def test_the_dashboard_stores_the_same(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = simulated.synthetic().Shape(ranks=6, steps=4, layers=40, buckets=4)
    one = simulated.synthetic().write_trace(tmp_path / "one" / "trace", shape)
    other = tmp_path / "other" / "trace"
    shutil.copytree(one, other)
    analyses, slack = [], []
    for trace in (open_trace(one), on(cluster, other)):
        stored = Stored(trace)
        stored.build_parts(range(len(stored.parts)), lambda number, part: None)
        analyses.append(json.dumps(stored.analyzed().analysis.to_json()))
        slack.append(stored.slack())
    assert slack[0] == slack[1] != ()
    assert analyses[0].replace(str(one), str(other)) == analyses[1]
    files = [path.name for path in (one / FOLDER).glob("timeline-*")]
    assert len(files) == len(stored.parts)
    for name in files:
        assert (one / FOLDER / name).read_bytes() == (other / FOLDER / name).read_bytes()


def test_some_steps_and_a_window_have_the_same_analysis(cluster):
    path = SAMPLES[0]
    assert document(on(cluster, path), range(2, 4)) == document(open_trace(path), range(2, 4))
    windows = [with_window(trace, "0:200000") for trace in (on(cluster, path), open_trace(path))]
    assert document(windows[0]) == document(windows[1])


def test_damage_is_noted_in_the_same_order(cluster, tmp_path):
    shape = simulated.synthetic().Shape(ranks=6, steps=2, layers=20, buckets=2)
    path = simulated.synthetic().write_trace(tmp_path / "trace", shape)
    for number, file in enumerate(sorted(path.glob("*.arrow"))):
        if number % 2:
            content = bytearray(file.read_bytes())
            content[-900:-800] = bytes(100)
            file.write_bytes(content)
    assert any(
        "its file is not what was recorded" in n for n in open_trace(path).analyze().trace.notes
    )
    assert_equal(cluster, path)


class Killing(DaskEngine):
    """Kills a worker, once, when some results have been fetched."""

    after: int
    doing = "reading ranks"
    killed: int | None = None

    def _fetched(self, futures, total, doing):
        for number, result in enumerate(super()._fetched(futures, total, doing)):
            if self.killed is None and doing == self.doing and number == self.after:
                self.killed = random.choice(list(self._client.run(os.getpid).values()))
                os.kill(self.killed, signal.SIGKILL)
            yield result


@pytest.mark.long
def test_1024_ranks_have_the_same_analysis_though_a_worker_is_killed(cluster, wide):
    engine = Killing(cluster._client)
    engine.after = random.Random().randrange(1000)
    print(f"a worker is killed after {engine.after} ranks")
    assert document(on(engine, wide)) == document(open_trace(wide))
    assert engine.killed is not None
    assert engine.killed not in cluster._client.run(os.getpid).values()


@pytest.mark.long
def test_ranges_have_the_same_analysis_though_a_worker_is_killed(cluster, tmp_path):
    shape = simulated.synthetic().Shape(ranks=8, steps=40, layers=40, buckets=4)
    path = simulated.synthetic().write_trace(tmp_path / "trace", shape)
    engine = Killing(cluster._client)
    engine.after, engine.doing = random.Random().randrange(8), "analyzing ranges of steps"
    print(f"a worker is killed after {engine.after} ranges")
    assert document(in_ranges(path, engine)) == document(in_ranges(path))
    assert engine.killed is not None


def test_no_callback_of_the_garbage_collector_can_lose_a_ctrl_c(cluster):
    assert not [each for each in gc.callbacks if each.__module__.startswith("distributed")]


def test_a_task_that_kills_every_worker_ends_the_analysis(cluster):
    with pytest.raises(EngineError, match="ended during the same task"):
        list(cluster.map(os._exit, [1], "ending workers"))
    assert list(cluster.map(abs, [-1, -2], "going on")) == [1, 2]


def one_line(arguments: list[str]) -> str:
    """What `analyze` says of a trace that it cannot analyze."""
    answer = CliRunner().invoke(analyze, [str(SAMPLES[0]), "--engine", "dask", *arguments])
    assert answer.stdout == ""
    text = str(answer.exception)
    assert isinstance(answer.exception, (EngineError, MissingCapabilityError, UsageError)), text
    assert "\n" not in text
    return text


@pytest.fixture
def impatient(monkeypatch):
    import dask

    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        yield


def test_a_scheduler_that_does_not_answer(impatient):
    address = f"tcp://127.0.0.1:{free_port()}"
    text = one_line(["--scheduler", address])
    assert text.startswith(
        f"no Dask scheduler answers at {address}: start one with 'dask scheduler'"
    )
    assert "no Dask scheduler answers at nonsense" in one_line(["--scheduler", "nonsense"])


def test_a_scheduler_without_workers(impatient):
    with distributed.LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as empty:
        text = one_line(["--scheduler", empty.scheduler_address])
    assert "has no workers after 1 s: start some with 'dask worker'" in text


def test_a_worker_with_another_version(tmp_path):
    other = tmp_path / "ddltrace-0.0.7.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: ddltrace\nVersion: 0.0.7\n")
    with distributed.LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as foreign:
        address = foreign.scheduler_address
        options = ["--no-nanny", "--no-dashboard", "--nthreads=1", f"--local-directory={tmp_path}"]
        worker = subprocess.Popen(
            [sys.executable, "-m", "distributed.cli.dask_worker", address, *options],
            cwd=tmp_path,  # in the clone, metadata of an editable installation would come first
            env=environment(PYTHONPATH=str(tmp_path)),
            stderr=subprocess.DEVNULL,
        )
        try:
            text = one_line(["--scheduler", address])
        finally:
            worker.kill()
            worker.wait()
    assert "has ddltrace 0.0.7, this command" in text
    assert text.endswith("install the same version on all workers")


def test_a_worker_that_does_not_answer():
    class Silent:
        def wait_for_workers(self, *_, **__):
            pass

        def run(self, *_, **__):
            return {"tcp://there:1": OSError("Timed out")}

    with pytest.raises(EngineError, match=r"worker tcp://there:1 does not answer \(Timed out\)"):
        dask_engine._check_workers(Silent(), None)


def test_a_worker_with_other_code():
    _, content = dask_worker.pack(abs, -1)
    with pytest.raises(UsageError, match=r"a Dask worker has ddltrace .* install the same version"):
        dask_worker.execute(("0.1.0 (code 00000000)", content))


def test_workers_that_do_not_see_the_trace(cluster, tmp_path, monkeypatch):
    (tmp_path / "trace").symlink_to(SAMPLES[0])
    monkeypatch.chdir(tmp_path)
    # The path means another directory in each process.
    with pytest.raises(EngineError, match=r"does not see .*: put the files on a filesystem"):
        on(cluster, Path("/proc/self/cwd/trace"))


def test_the_extra_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert one_line([]) == ("--engine dask needs dask[distributed]: pip install 'ddltrace[dask]'")


def test_a_scheduler_belongs_to_dask():
    answer = CliRunner().invoke(analyze, [str(SAMPLES[0]), "--scheduler", "tcp://head:8786"])
    assert isinstance(answer.exception, UsageError)
    assert "add --engine dask" in str(answer.exception)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["starting", "started"])
def test_ctrl_c_leaves_no_process(wide, moment):
    # A background job of a shell ignores the signal, and so would its children.
    program = (
        "import signal, sys; from ddltrace.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler); main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "analyze", str(wide), "--engine", "dask"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    if moment == "started":
        assert "a local Dask cluster with" in process.stderr.readline()
    while len(children := psutil.Process(process.pid).children(recursive=True)) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr.strip()) == (130, "", "ddltrace: interrupted")
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_a_stranger_gives_a_local_cluster_no_task() -> None:
    from distributed import Client
    from distributed.security import Security

    with open_dask(workers=1) as engine:
        address = engine._client.scheduler.address
        assert address.startswith("tls://127.0.0.1:")
        stranger = Security.temporary()  # a certificate, but not of this cluster
        with pytest.raises(OSError, match=r"(?i)certificate|timed out"):
            Client(address, security=stranger, timeout=2, set_as_default=False)
        with pytest.raises(OSError, match=r"(?i)timed out|closed|TLS"):
            Client(address.replace("tls", "tcp"), timeout=2, set_as_default=False)
        assert list(engine.map(len, ["abc"], "counting")) == [3]
