"""Message libraries carry what Gloo carries, in real jobs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from support.jobs import DDLTRACE, on_ranks, run

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.optional_packages import missing_packages

LIBRARIES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(bool(missing_packages(extra)), reason=f"needs ddltrace[{extra}]"),
    )
    for name, extra in (("zmq", "zmq"), ("grpc", "grpc"), ("mpi", "mpi"), ("ucx", "mpi"))
]
LIBRARIES.append(pytest.param("tcp:connections=3"))


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.long
def test_collectives_agree_with_gloos(name: str, tmp_path: Path) -> None:
    done = run(on_ranks("transport_collectives.py", name, ranks=3), cwd=tmp_path)
    assert done.status == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") == 3


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_rank_that_is_gone_is_an_error_where_it_is_awaited(name: str, tmp_path: Path) -> None:
    done = run(on_ranks("transport_death.py", name), cwd=tmp_path)
    assert "reported: " in done.stdout, done.stderr[-3000:]
    assert "rank 1" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", LIBRARIES[:1])
def test_a_strategys_messages_travel_over_its_transport(name: str, tmp_path: Path) -> None:
    command = [
        *DDLTRACE,
        "experiment",
        "run",
        "--repeats=1",
        "--strategy",
        "ddp",
        "--strategy",
        f"wfbp+{name}",
    ]
    options = ["--steps", "12", "--warmup", "4", "--width", "8", "-o", "e", "--json"]
    done = run([*command, *options], cwd=tmp_path)
    assert done.status == 0, done.stderr[-3000:]
    plain, over = json.loads(done.stdout)["rows"]
    assert over["strategy"] == f"wfbp+{name}"
    assert over["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-5)
    # Its sockets are ordinary TCP sockets, so their bytes are counted, too.
    assert over["wire_bytes"] == pytest.approx(plain["wire_bytes"], rel=0.2)
    trace = open_trace(tmp_path / "e" / f"wfbp-{name}")
    events = trace.events(0).to_pylist()
    backends = Counter(
        trace.group_backend(event["group"])
        for event in events
        if event["kind"] == "message" and event["op"] == "all_reduce" and event["tensors"]
    )
    assert set(backends) == {name}, backends


@pytest.mark.long
def test_the_comparison_reports_each_library(tmp_path: Path) -> None:
    command = [*DDLTRACE, "experiment", "transports", "--transport", "gloo", "--transport", "nccl"]
    done = run([*command, "--max-bytes", "4096", "--rounds", "5", "--json"], cwd=tmp_path)
    assert done.status == 0, done.stderr[-3000:]
    gloo, nccl = json.loads(done.stdout)["transports"]
    assert gloo["status"] == "complete"
    sizes = [point["bytes"] for point in gloo["points"] if point["operation"] == "push_pull"]
    assert sizes == [4, 16, 64, 256, 1024, 4096]
    assert all(point["us"] > 0 for point in gloo["points"])
    assert set(gloo["fits"]) == {"ping_pong", "push_pull", "all_reduce"}
    assert (nccl["status"], "GPU" in nccl["reason"]) in {("unavailable", True), ("complete", False)}


@pytest.mark.long
def test_a_profile_paces_real_messages_or_is_refused(tmp_path: Path) -> None:
    # With 4 ms and more a message, this machine can keep the profile; with 1.2 us it cannot.
    profiles = ["--protocol", "rdma", "--protocol", "ipoib:slowdown=200"]
    command = [*DDLTRACE, "experiment", "transports", *profiles, "--json"]
    done = run([*command, "--max-bytes", "65536", "--rounds", "5"], cwd=tmp_path)
    rdma, ipoib = json.loads(done.stdout)["transports"]
    assert (rdma["status"], rdma["protocol"]) == ("unavailable", "rdma")
    assert "use --protocol rdma:slowdown=" in rdma["reason"]
    assert ipoib["status"] == "complete", ipoib
    one_way = {p["bytes"]: p["us"] / 2 for p in ipoib["points"] if p["operation"] == "ping_pong"}
    for size, us in one_way.items():
        assert us >= 200 * (19.8 + size * 8e-3 / 5.608), size
    planned = ipoib["planned"]
    assert planned["messages"] >= 8 * len(one_way)
    assert planned["taken_us"] >= planned["planned_us"] >= planned["messages"] * 200 * 19.8
