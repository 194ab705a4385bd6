"""NCCL's profiler plugin, loaded and driven by a host program as NCCL does."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.nccl_host import VERSIONS, Host, build_host, host_environment, rings_of

from ddltrace.analyzer.nccl.ring_file import read_ring
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.nccl.event_kinds import KINDS
from ddltrace.tracer.nccl.job_rings import switch_events

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

_EVERYTHING = "0xffff"
_FAILED = ("Sanitizer", "runtime error")


@pytest.fixture(scope="module")
def host() -> Host:
    return build_host()


def rows_of(folder: Path, rank: int = 5) -> list[dict[str, Any]]:
    (ring,) = rings_of(folder)
    assert ring.rank == rank
    return ring.events.to_pylist()


def of_kind(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


def checked(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == done.stderr == ""


@pytest.mark.parametrize("version", VERSIONS)
def test_records_what_nccl_reports(host: Host, version: int, tmp_path: Path) -> None:
    checked(host.run(tmp_path, version, "sequence", 2, DDLTRACE_NCCL_EVENTS=_EVERYTHING))
    rows = rows_of(tmp_path)
    counts = Counter(row["kind"] for row in rows)
    expected = {"group": 2, "coll": 2, "p2p": 1, "proxy_op": 8, "proxy_step": 16}
    expected |= {"net_plugin": 16, "kernel_ch": 4}
    if version >= 5:
        expected |= {"group_api": 2, "coll_api": 2, "kernel_launch": 2}
    if version >= 6:
        expected |= {"ce_coll": 1, "ce_sync": 1, "ce_batch": 1}
    if version >= 7:
        expected |= {"kernel_phase": 12}
    assert counts == expected
    assert all(row["end_ns"] >= row["start_ns"] for row in rows)
    comm = {(row["comm"], row["comm_name"], row["comm_rank"]) for row in rows}
    if version == 3:
        assert comm == {("000000000000abc3", "comm three", 0)}
    else:
        assert comm == {(f"{0xFEED0000 + version:016x}", "default_pg", 3)}

    by_number = {row["event"]: row for row in rows}
    first, second = of_kind(rows, "coll")
    assert (first["func"], first["datatype"], first["algo"]) == ("AllReduce", "ncclFloat32", "RING")
    assert (first["proto"], first["channels"], first["warps"]) == ("SIMPLE", 2, 16)
    assert (first["seq"], second["seq"], first["count"], first["bytes"]) == (0, 1, 256, 1024)
    assert first["recv_buffer"] == first["send_buffer"] + 1
    parent = by_number[first["parent"]]
    if version >= 5:
        assert parent["kind"] == "coll_api"
        assert by_number[first["group_event"]]["kind"] == "group"
        assert [row["graph_captured"] for row in of_kind(rows, "coll_api")] == [False, True]
        assert parent["stream"] == 0x5000
    else:
        assert parent["kind"] == "group"
    tag = 42 if version >= 7 else None
    assert (first["user_tag"], first["variant"]) == (tag, "Symk" if version >= 7 else None)
    assert first["is_symmetric"] is (version >= 7)

    (send,) = of_kind(rows, "p2p")
    assert (send["func"], send["peer"], send["bytes"]) == ("Send", 2, 512)
    kernels = [row for row in of_kind(rows, "kernel_ch") if row["parent"] == second["event"]]
    assert [row["channel"] for row in kernels] == [0, 1]
    assert [row["gpu_end_ns"] for row in kernels] == [1000400, 1000401]
    gpu_starts = [None, None] if version == 3 else [1000100, 1000101]
    assert [row["gpu_start_ns"] for row in kernels] == gpu_starts


@pytest.mark.parametrize("version", VERSIONS)
def test_records_what_is_sent_and_received(host: Host, version: int, tmp_path: Path) -> None:
    checked(host.run(tmp_path, version, "sequence", 2))
    rows = rows_of(tmp_path)
    by_number = {row["event"]: row for row in rows}
    for op in of_kind(rows, "proxy_op"):
        assert by_number[op["parent"]]["kind"] == "coll"
        assert (op["peer"], op["steps"], op["chunk_bytes"]) == (1, 2, 4096)
        assert op["bytes"] == (500500 if version == 3 else None)
        steps = [row for row in of_kind(rows, "proxy_step") if row["parent"] == op["event"]]
        assert [step["step_number"] for step in steps] == [0, 1]
        assert [step["bytes"] for step in steps] == [1000, 2000]
        for step in steps:
            times = [step["gpu_wait_ns"], step["peer_wait_ns"], step["net_wait_ns"]]
            if not op["is_send"]:
                times.reverse()
            elif version == 3:
                del times[1]
            assert times == sorted(times)
            assert step["start_ns"] <= times[0] <= times[-1] <= step["end_ns"]
    net = of_kind(rows, "net_plugin")[0]
    assert (net["device"], net["bytes"]) == (2, 1000)


@pytest.mark.parametrize("version", [6, 7])
def test_records_copy_engines_and_phases(host: Host, version: int, tmp_path: Path) -> None:
    checked(host.run(tmp_path, version, "sequence", 2, DDLTRACE_NCCL_EVENTS=_EVERYTHING))
    rows = rows_of(tmp_path)
    (copy,) = of_kind(rows, "ce_coll")
    assert (copy["func"], copy["seq"], copy["bytes"]) == ("AllGather", 3, 128)
    assert copy["variant"] == "MC"
    assert [row["bytes"] for row in of_kind(rows, "ce_batch")] == [8192]
    if version >= 7:
        phases = of_kind(rows, "kernel_phase")[:3]
        assert [row["variant"] for row in phases] == ["initial_sync", "compute", "final_sync"]
        assert {row["parent"] for row in phases} == {of_kind(rows, "kernel_ch")[0]["event"]}
        assert phases[-1]["gpu_end_ns"] == 1000300


@pytest.mark.parametrize("version", VERSIONS)
def test_kernel_channels_are_off_where_they_cost_the_job(
    host: Host, version: int, tmp_path: Path
) -> None:
    checked(host.run(tmp_path, version, "sequence"))
    kinds = {row["kind"] for row in rows_of(tmp_path)}
    assert ("kernel_ch" in kinds) == (version < 7)
    assert {"proxy_step", "coll"} <= kinds


def test_records_the_named_kinds_and_their_parents(host: Host, tmp_path: Path) -> None:
    checked(host.run(tmp_path, 6, "sequence", DDLTRACE_NCCL_EVENTS="coll,nonsense"))
    kinds = {row["kind"] for row in rows_of(tmp_path)}
    assert kinds == {"coll", "coll_api", "group", "group_api"}


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_that_nccl_should_not_make(host: Host, version: int, tmp_path: Path) -> None:
    checked(host.run(tmp_path, version, "hostile"))
    (ring,) = rings_of(tmp_path)
    rows = ring.events.to_pylist()
    foreign = of_kind(rows, "proxy_op")[0]
    # Its parent is in another process, and so is the context with which NCCL makes its steps.
    assert foreign["parent_pid"] == ring.pid + 1
    assert foreign["comm"] is None
    (step,) = of_kind(rows, "proxy_step")
    assert step["comm"] is None
    assert (step["parent"], step["bytes"]) == (foreign["event"], 64)
    assert len([row for row in rows if (row["func"] or "").startswith("Operation")]) >= 245
    assert any("beyond those that a ring can hold" in note for note in ring.notes)
    if version >= 5:
        assert any("3 events have a kind" in note for note in ring.notes)
    late = of_kind(rows, "proxy_op")[-1]
    assert late["end_ns"] is not None


@pytest.mark.parametrize("version", VERSIONS)
def test_several_communicators(host: Host, version: int, tmp_path: Path) -> None:
    checked(host.run(tmp_path, version, "comms", 3))
    colls = of_kind(rows_of(tmp_path), "coll")
    if version == 3:  # it names the communicator in the messages, all of one name here
        assert len(colls) == 5
        return
    names = ["", "n" * 71, "n" * 71, "world", "shrunk"]
    assert [row["comm_name"] or "" for row in colls] == names
    assert [int(row["comm"], 16) for row in colls] == [200, 201, 202, 100, 300]


def test_more_communicators_than_a_ring_describes(host: Host, tmp_path: Path) -> None:
    checked(host.run(tmp_path, 5, "comms", 1100))
    (ring,) = rings_of(tmp_path)
    assert any("79 communicators are beyond" in note for note in ring.notes)
    colls = of_kind(ring.events.to_pylist(), "coll")
    assert len([row for row in colls if row["comm"] is None]) == 79


def test_a_full_ring_keeps_the_newest_events(host: Host, tmp_path: Path) -> None:
    checked(host.run(tmp_path, 5, "sequence", 50, DDLTRACE_NCCL_RECORDS="100"))
    (ring,) = rings_of(tmp_path)
    numbers = ring.events["event"].to_pylist()
    assert numbers == list(range(numbers[0], numbers[0] + 100))
    assert ring.overwritten == numbers[0] - 1
    assert any("were overwritten" in note for note in ring.notes)
    # Their ends are their own, though their records were others' before.
    assert all(row["end_ns"] >= row["start_ns"] for row in ring.events.to_pylist())


def test_threads_share_a_ring(host: Host, tmp_path: Path) -> None:
    checked(host.run(tmp_path, 5, "threads", 200, DDLTRACE_NCCL_RECORDS="100000"))
    (ring,) = rings_of(tmp_path)
    counts = Counter(ring.events["kind"].to_pylist())
    assert (counts["coll"], counts["p2p"], counts["proxy_step"]) == (800, 800, 3200)
    assert ring.events["end_ns"].null_count == 0
    assert ring.notes == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_forked_child_does_not_write_into_its_parents_ring(
    host: Host, version: int, tmp_path: Path
) -> None:
    checked(host.run(tmp_path, version, "fork", 1))
    first, second = sorted(rings_of(tmp_path), key=lambda ring: ring.opened_ns)
    assert [row["seq"] for row in of_kind(first.events.to_pylist(), "coll")] == [0, 3]
    assert [row["seq"] for row in of_kind(second.events.to_pylist(), "coll")] == [2]
    assert first.pid != second.pid


def test_the_ring_goes_on_after_nccl_unloads_the_plugin(host: Host, tmp_path: Path) -> None:
    checked(host.run(tmp_path, 5, "reload"))
    assert len(of_kind(rows_of(tmp_path), "coll")) == 3


def test_events_of_a_killed_process_are_there(host: Host, tmp_path: Path) -> None:
    assert host.run(tmp_path, 5, "killed", 20).returncode == -9
    assert len(of_kind(rows_of(tmp_path), "coll")) == 20


def test_the_mask_is_switched_while_the_job_runs(host: Host, tmp_path: Path) -> None:
    job = subprocess.Popen(
        host.command(6, "control"),
        env=host_environment(tmp_path, DDLTRACE_NCCL_EVENTS="group"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdin is not None
    assert job.stdout is not None

    def advance() -> int:
        """Lets the job make one collective; returns the mask that NCCL sees then."""
        assert job.stdin is not None
        assert job.stdout is not None
        job.stdin.write("\n")
        job.stdin.flush()
        return int(job.stdout.readline())

    coll, step = 1 << KINDS.index("coll"), 1 << KINDS.index("proxy_step")
    assert advance() == 1
    assert switch_events(tmp_path, "coll") == 1
    assert advance() == coll | 1
    switch_events(tmp_path, "0x0")
    assert advance() == 1  # one kind stays on in NCCL, so that the plugin is still called
    switch_events(tmp_path, "proxy_step")
    assert advance() == step | 1
    for unknown in ("nothing", "012"):  # C would read the latter as octal
        with pytest.raises(UsageError, match="no kind of event"):
            switch_events(tmp_path, unknown)
    with pytest.raises(UsageError, match="no ring"):
        switch_events(tmp_path / "missing", "coll")
    job.stdin.close()
    assert job.wait(timeout=60) == 0
    counts = Counter(row["kind"] for row in rows_of(tmp_path))
    assert (counts["group"], counts["coll"], counts["proxy_step"]) == (3, 2, 2)
    job.stdout.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_declines_without_a_place_to_write(host: Host, version: int, tmp_path: Path) -> None:
    for folder in (str(tmp_path / "missing"), "/proc", ""):
        checked(host.run(tmp_path, version, "sequence", DDLTRACE_NCCL_DIR=folder))
    assert list(tmp_path.iterdir()) == []


def test_declines_where_the_file_may_not_be_so_large(host: Host, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = subprocess.run(
        host.command(5, "sequence"),
        env=host_environment(tmp_path, DDLTRACE_NCCL_RECORDS="100000"),
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    checked(done)
    assert list(tmp_path.iterdir()) == []


def test_does_not_touch_the_file_of_an_earlier_process(host: Host, tmp_path: Path) -> None:
    """Containers give the same ids again."""
    script = 'echo mine > "$0/nccl-5-$$.ring"; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, str(tmp_path), *host.command(5, "sequence")],
        env=host_environment(tmp_path),
        check=False,
    )
    assert done.returncode == 0
    first, second = sorted(tmp_path.iterdir(), key=lambda path: len(path.name))
    assert first.read_text(encoding="utf-8") == "mine\n"
    assert second.name == first.name.replace(".ring", "-1.ring")
    assert read_ring(second).rank == 5


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize("version", VERSIONS)
def test_sanitizers_find_nothing(sanitizer: str, version: int, tmp_path: Path) -> None:
    host = build_host(sanitizer)
    scenarios = ["sequence", "hostile", "comms", "threads", "reload"]
    if sanitizer != "thread":  # whose runtime forbids new threads in a forked child
        scenarios.append("fork")
    for scenario in scenarios:
        done = host.run(
            tmp_path,
            version,
            scenario,
            40,
            DDLTRACE_NCCL_RECORDS="64",
            DDLTRACE_NCCL_EVENTS=_EVERYTHING,
        )
        assert done.returncode == 0, done.stderr
        assert not any(word in done.stderr for word in _FAILED), done.stderr


def test_memory_does_not_grow(host: Host, tmp_path: Path) -> None:
    """About 900,000 events; `benchmarks/nccl_plugin.py` makes 100 million."""
    done = host.run(tmp_path, 5, "soak", 10_000, DDLTRACE_NCCL_RECORDS="10000")
    assert done.returncode == 0
    assert int(done.stdout) <= 64  # KiB
