"""The emulated network, made for real: as fast as it says, and always taken down."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.jobs import JOBS, run, traced

from ddltrace.analyzer.measures.connections import slow_connections
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.experiments.network.emulated import EmulatedNetwork, remove_leftovers
from ddltrace.experiments.network.link_check import (
    LinksOffError,
    check_links,
    check_round_trip,
)
from ddltrace.experiments.network.topology import SlowHost, Topology
from ddltrace.tracer.errors import MissingCapabilityError


def why_not() -> str | None:
    """Why no network can be made here; None if it can."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        return "needs Linux and iproute2"
    if os.geteuid() != 0:
        return "needs root"
    try:
        with EmulatedNetwork(Topology(2, 1_000_000_000)):
            return None
    except MissingCapabilityError as error:
        return str(error)


pytestmark = pytest.mark.netns


@pytest.fixture(scope="module", autouse=True)
def network_or_skip() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no emulated network here: {reason}")


LAUNCH = [sys.executable, "-m", "ddltrace.experiments.network.launch"]
HOSTS = ["--hosts", "2", "--bandwidth", "400mbit", "--"]

ALL_REDUCE = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
vector = torch.ones(1 << 22)
dist.all_reduce(vector)
times = []
for _ in range(3):
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(vector)
    times.append(time.perf_counter() - start)
size = dist.get_world_size()
if dist.get_rank() == 0:
    print(2 * (size - 1) / size * vector.nbytes * 8 / sorted(times)[1])
dist.destroy_process_group()
"""


def namespaces_of(pid: int) -> list[str]:
    folder = Path("/run/netns")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(name for name in names if name.startswith(f"ddltrace-{pid}-"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.02)


@pytest.fixture
def sleeping(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher whose two ranks have written their process ids and sleep."""
    script = "echo $$ > $0/rank$RANK.tmp; mv $0/rank$RANK.tmp $0/rank$RANK; exec sleep 1000"
    process = subprocess.Popen([*LAUNCH, *HOSTS, "sh", "-c", script, str(tmp_path)])
    try:
        wait_until(lambda: all((tmp_path / f"rank{rank}").exists() for rank in (0, 1)))
        yield process
    finally:
        process.kill()
        process.wait()
        remove_leftovers()


def rank_pids(folder: Path) -> list[int]:
    return [int((folder / f"rank{rank}").read_text()) for rank in (0, 1)]


def is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_an_all_reduce_gets_the_rate_of_the_link() -> None:
    done = subprocess.run(
        [*LAUNCH, *HOSTS, sys.executable, "-c", ALL_REDUCE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Never above the link's rate (plus what the bucket lets through at once), and most of it:
    # headers take 4 %.
    assert 0.80 * 400e6 < float(done.stdout) < 1.03 * 400e6


def test_the_status_of_a_failed_rank_comes_back_and_the_others_are_ended() -> None:
    script = "if [ $RANK = 1 ]; then exit 7; else exec sleep 1000; fi"
    process = subprocess.Popen([*LAUNCH, *HOSTS, "sh", "-c", script])
    assert process.wait(timeout=60) == 7
    assert namespaces_of(process.pid) == []


def test_every_host_has_a_name_and_the_machine_keeps_its_own() -> None:
    before = socket.gethostname()
    done = subprocess.run(
        [*LAUNCH, *HOSTS, "hostname"], capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(done.stdout.split()) == ["host0", "host1"]
    assert socket.gethostname() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_and_the_network(
    sleeping: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    assert len(namespaces_of(sleeping.pid)) == 3
    sleeping.send_signal(number)
    assert sleeping.wait(timeout=60) == 128 + number
    assert namespaces_of(sleeping.pid) == []
    assert not any(map(is_alive, rank_pids(tmp_path)))


def test_a_killed_launcher_takes_its_ranks_and_its_network_along(
    sleeping: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert len(namespaces_of(sleeping.pid)) == 3
    sleeping.kill()
    sleeping.wait()
    wait_until(lambda: not any(map(is_alive, rank_pids(tmp_path))))
    wait_until(lambda: namespaces_of(sleeping.pid) == [])


def test_what_is_left_when_the_janitor_is_killed_too_is_found(
    sleeping: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    with EmulatedNetwork(Topology(2, 400_000_000)) as living:
        os.kill(janitor_of(sleeping.pid), signal.SIGKILL)
        sleeping.kill()
        sleeping.wait()
        wait_until(lambda: not any(map(is_alive, rank_pids(tmp_path))))
        left = namespaces_of(sleeping.pid)
        assert len(left) == 3
        assert set(left) <= set(remove_leftovers())
        assert namespaces_of(sleeping.pid) == []
        assert set(living.hosts) <= set(namespaces_of(os.getpid()))
    assert namespaces_of(os.getpid()) == []


def janitor_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (janitor,) = (
        int(child)
        for child in children
        if b"ddltrace-janitor" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    return janitor


@pytest.mark.long
def test_the_report_names_the_host_with_the_slow_link(tmp_path: Path) -> None:
    network = ["--hosts", "4", "--bandwidth", "400mbit", "--slow-host", "host=2,factor=5"]
    job = [sys.executable, str(JOBS / "late_rank.py"), "", "0", "40"]
    done = run(traced(tmp_path / "trace", job, *network), cwd=tmp_path)
    assert done.status == 0, done.stderr
    analysis = open_trace(tmp_path / "trace").analyze()
    slow = slow_connections(analysis.connections)
    assert slow is not None
    assert slow.host == "host2"
    assert slow.rows[0].rate_gbps == pytest.approx(0.08, rel=0.3)
    (finding,) = (one for one in analysis.findings if one.kind == "network")
    assert "host host2 is an end of all of them" in finding.evidence


def test_racks_and_a_slow_host_are_as_they_are_to_be(tmp_path: Path) -> None:
    options = ["--hosts-per-rack", "2", "--bandwidth-between", "100mbit", "--ranks-per-host", "2"]
    options += ["--slow-host", "host=1,factor=4"]
    command = ["sh", "-c", "echo $RANK $LOCAL_RANK $(hostname)"]
    done = subprocess.run(
        [*LAUNCH, "--hosts", "4", "--bandwidth", "400mbit", *options, "--", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = [f"{rank} {rank % 2} host{rank // 2}" for rank in range(8)]
    assert sorted(done.stdout.splitlines()) == expected
    # It would have refused links that are off by more than 5 %.
    rates = re.findall(r"(\w+ to \w+) \S+ of (\d+) Mbit/s", done.stderr)
    assert dict(rates) == {
        "host0 to host1": "100",
        "host1 to host0": "100",
        "host2 to host3": "400",
        "host3 to host2": "400",
        "rack0 to rack1": "100",
        "rack1 to rack0": "100",
    }


def test_a_host_can_become_slow_while_the_job_runs() -> None:
    with EmulatedNetwork(Topology(2, 400_000_000, slow_host=SlowHost(1, 8, 1))) as network:
        before = check_links(network)
        network.slow_down()
        with pytest.raises(LinksOffError, match=r"host0 to host1 \S+ of 400 Mbit/s"):
            check_links(network)
    assert not any(link.is_off for link in before)


def test_delay_works_or_names_the_missing_module() -> None:
    with EmulatedNetwork(Topology(2, 400_000_000, delay_seconds=0.005)) as network:
        try:
            network.delay()
        except MissingCapabilityError as error:
            assert "sch_netem" in str(error)  # noqa: PT017 - both outcomes are right
        else:
            # At least: a loaded machine adds to it.
            assert check_round_trip(network) >= 0.01


def test_a_network_that_fails_half_way_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddltrace.experiments.network.emulated._QUEUE", "nonsense")
    with (
        pytest.raises(MissingCapabilityError, match="nonsense"),
        EmulatedNetwork(Topology(2, 1_000_000)),
    ):
        pass
    assert namespaces_of(os.getpid()) == []


@pytest.mark.long
def test_encoded_gradients_are_reduced_inside_hosts_and_then_between_them(tmp_path: Path) -> None:
    job = Path(__file__).parent / "jobs" / "hybrid_job.py"
    command = [sys.executable, "-m", "ddltrace", "experiment", "run", "--strategy", "qgz"]
    command += ["--hosts", "2", "--ranks-per-host", "2", "--bandwidth", "400mbit", "--steps", "4"]
    command += ["--repeats", "1", "--max-other-cores", "1000", "-o", "out", "--"]
    command += [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    done = run([*command, str(job), "losses", "flat"], cwd=tmp_path, timeout=300)
    assert done.status == 0, done.stderr
    trace = open_trace(tmp_path / "out" / "fsdp-reduce-int4")
    groups = {
        row["group"]
        for row in trace.events(0).to_pylist()
        if row["kind"] == "message" and row["op"] == "all_to_all"
    }
    assert groups == {"inside host 0,1", "between hosts 0,2"}
