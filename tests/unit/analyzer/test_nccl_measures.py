"""Measures of NCCL's events, against values computed by hand. Times in nanoseconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ring_writer import RingWriter

from ddltrace.analyzer.analysis import analyze
from ddltrace.analyzer.measures.nccl import Nccl
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.report.nccl_text import nccl_verdicts

COMM = 0xABC


def measured(folder: Path) -> Nccl:
    found = analyze(open_trace(folder)).nccl
    assert found is not None
    return found


def rings_of(count: int, hosts: int = 1) -> list[tuple[RingWriter, int]]:
    """A ring per rank, ranks spread over hosts in blocks, and the communicator in it."""
    rings = []
    for rank in range(count):
        ring = RingWriter(rank, 10 + rank, host=f"host{rank * hosts // count}", capacity=4096)
        rings.append((ring, ring.comm(COMM, rank, count, hosts)))
    return rings


def kernel(ring: RingWriter, comm: int, coll: int, *spans: tuple[int, int]) -> int:
    """Channels of a collective by the GPU's timer."""
    number = 0
    for channel, (begin, end) in enumerate(spans):
        number = ring.add(
            "kernel_ch", 2, 3, comm=comm, parent=coll, channel=channel, sequence=begin, value=end
        )
    return number


def test_waiting_and_transfer_from_kernels(tmp_path: Path) -> None:
    """The rank that comes last does not wait; each GPU's timer has an origin of its own."""
    for rank, (ring, comm) in enumerate(rings_of(2)):
        origin = 1_000_000 * (rank + 1)
        for seq, waits in enumerate([(700, 0), (0, 300), (500, 0)]):
            coll = ring.coll(comm, 100 * seq + 1, 100 * seq + 2, seq, 250)
            begin = origin + 10_000 * seq
            # Two channels: the first begins first, the second ends last.
            spans = [(begin, begin + 1900 + waits[rank]), (begin + 50, begin + 2000 + waits[rank])]
            kernel(ring, comm, coll, *spans)
        ring.write(tmp_path)
    (row,) = measured(tmp_path).collectives
    assert (row.func, row.bytes, row.ranks, row.count) == ("AllReduce", 1000, 2, 3)
    # Kernels of 2700 and 2000, 2000 and 2300, 2500 and 2000: of half of them the longer part waits.
    assert row.kernel_us == pytest.approx((2.0 + 2.3) / 2)
    assert row.wait_us == pytest.approx((350 + 150 + 250) / 3 / 1e3)
    assert row.transfer_us == pytest.approx(2.0)
    assert row.algbw_gbps == pytest.approx(8 * 1000 / 2000)
    assert row.final_sync_us is None


def test_waiting_is_not_known_if_a_rank_was_not_recorded(tmp_path: Path) -> None:
    ring, comm = rings_of(2)[0]
    coll = ring.coll(comm, 1, 2, 0, 250)
    kernel(ring, comm, coll, (10, 2010))
    ring.write(tmp_path)
    (row,) = measured(tmp_path).collectives
    assert (row.kernel_us, row.wait_us, row.transfer_us) == (pytest.approx(2.0), None, None)


def test_waiting_and_transfer_from_phases(tmp_path: Path) -> None:
    for rank, (ring, comm) in enumerate(rings_of(2)):
        coll = ring.coll(comm, 1, 2, 0, 250)
        channel = kernel(ring, comm, coll, (100, 2000))
        edges = (100, 400, 1700, 2000) if rank == 0 else (100, 200, 1600, 2000)
        for phase, name in enumerate(("initial_sync", "compute", "final_sync")):
            ring.add(
                "kernel_phase", 2, 3, comm=comm, parent=channel, steps=phase, variant=name,
                sequence=edges[phase], value=edges[phase + 1],
            )  # fmt: skip
        ring.write(tmp_path)
    (row,) = measured(tmp_path).collectives
    assert row.wait_us == pytest.approx((300 + 100) / 2 / 1e3)
    assert row.transfer_us == pytest.approx(1.4)
    assert row.final_sync_us == pytest.approx((300 + 400) / 2 / 1e3)


def choose(folder: Path, lengths: dict[str, list[int]]) -> None:
    """A rank alone in its communicator, which makes collectives with several algorithms."""
    ring = RingWriter(0, 10, capacity=4096)
    comm = ring.comm(COMM, 0, 1)
    seq = 0
    for algo, times in lengths.items():
        for time in times:
            coll = ring.coll(comm, 10 * seq + 1, 10 * seq + 2, seq, 250, algo=algo)
            kernel(ring, comm, coll, (1000 * seq + 1, 1000 * seq + 1 + time))
            seq += 1
    ring.write(folder)


def test_a_choice_that_loses_is_named(tmp_path: Path) -> None:
    choose(tmp_path, {"RING": [100, 102, 98, 101, 99, 100, 100], "TREE": [60, 62, 58, 61, 59]})
    found = measured(tmp_path)
    (choice,) = found.choices
    (verdict,) = nccl_verdicts(found)
    assert verdict.startswith(
        "AllReduce of 1.00 kB in 1 ranks: RING/SIMPLE takes 100 ns, TREE/SIMPLE"
    )
    assert verdict.endswith("try NCCL_ALGO=TREE NCCL_PROTO=SIMPLE")
    assert (choice.algo, choice.better_algo, choice.bytes) == ("RING", "TREE", 1000)
    assert (choice.count, choice.better_count) == (7, 5)
    assert (choice.transfer_us, choice.better_transfer_us) == (0.1, 0.06)


@pytest.mark.parametrize(
    "lengths",
    [
        {"RING": [100] * 7, "TREE": [60] * 4},  # too few
        {"RING": [100] * 7, "TREE": [95] * 7},  # not much
        {"RING": [60] * 7, "TREE": [100] * 5},  # the usual one is the best
        {"RING": [40, 60, 100, 140, 160, 100], "TREE": [10, 85, 88, 150, 160]},  # chance
        {"RING": [100] * 9},
    ],
)
def test_no_advice_without_a_measured_difference(
    lengths: dict[str, list[int]], tmp_path: Path
) -> None:
    choose(tmp_path, lengths)
    assert measured(tmp_path).choices == ()


def exchange(
    folder: Path,
    *,
    ranks: int = 4,
    hosts: int = 2,
    net: dict[int, int] | None = None,
    held: dict[int, int] | None = None,
) -> None:
    """A ring of ranks; each sends 25 steps of 1000 bytes to the next one.

    Args:
        folder: Where the files are written.
        ranks: Number of ranks.
        hosts: Their hosts.
        net: Rank -> time of its sends with the network, 100 by default.
        held: Rank -> time for which its received data waits for its GPU, 10 by default.
    """
    for rank, (ring, comm) in enumerate(rings_of(ranks, hosts)):
        coll = ring.coll(comm, 1, 2, 0, 250)
        for is_send in (True, False):
            peer = (rank + (1 if is_send else -1)) % ranks
            op = ring.add(
                "proxy_op", 3, 99_999, comm=comm, parent=coll, peer=peer, flags=int(is_send)
            )
            for number in range(25):
                at = 1000 * (number + 1)
                if is_send:
                    states = (at, at + 20, at + 50)  # GPU, peer, network
                    end = at + 50 + (net or {}).get(rank, 100)
                else:
                    states = (at + 70, at + 60, at)  # GPU, flush, network
                    end = at + 70 + (held or {}).get(rank, 10)
                step = ring.add(
                    "proxy_step", at, end, parent=op, steps=number, value=1000, states=states
                )
                ring.add("net_plugin", at, end, parent=step, device=1 if is_send else 0, count=1000)
        ring.write(folder)


def test_links_and_traffic(tmp_path: Path) -> None:
    exchange(tmp_path, net={1: 200})
    found = measured(tmp_path)
    # Of four ranks on two hosts, 1 -> 2 and 3 -> 0 go between them.
    assert (found.inside_host_bytes, found.between_hosts_bytes) == (50_000, 50_000)
    assert found.unknown_bytes == 0
    (link,) = [link for link in found.links if link.rank == 1 and link.is_send]
    assert (link.peer, link.inside_host, link.device) == (2, False, 1)
    assert (link.steps, link.bytes) == (25, 25_000)
    assert (link.net_us, link.gpu_wait_us, link.peer_wait_us) == (0.2, 0.02, 0.03)
    assert link.bandwidth_gbps == pytest.approx(8 * 1000 / 200)
    (link,) = [link for link in found.links if link.rank == 1 and not link.is_send]
    assert (link.peer, link.device) == (0, 0)
    assert (link.net_us, link.gpu_wait_us, link.peer_wait_us) == (0.06, 0.01, None)


def test_steps_that_overlap_count_once_in_the_bandwidth(tmp_path: Path) -> None:
    exchange(tmp_path, net={0: 1500})  # the next step begins after 1000
    (link,) = [each for each in measured(tmp_path).links if each.rank == 0 and each.is_send]
    assert link.net_us == 1.5
    assert link.bandwidth_gbps == pytest.approx(8 * 25_000 / (24 * 1000 + 1500))


def test_a_slow_network_is_told_from_a_slow_gpu(tmp_path: Path) -> None:
    exchange(tmp_path, net={2: 400}, held={1: 900})
    found = measured(tmp_path)
    assert [row.slow for row in found.ranks] == [None, "gpu", "network", None]
    gpu, network = nccl_verdicts(found)
    assert gpu == "rank 1: received data waits 900 ns a step for its GPU, which is late"
    assert network == "rank 2 sends at 20.0 Gbit/s: its network is slow"


def test_ranks_alike_are_not_slow(tmp_path: Path) -> None:
    exchange(tmp_path, net={2: 130}, held={1: 14})
    assert [row.slow for row in measured(tmp_path).ranks] == [None] * 4


def test_peers_without_a_ring_have_no_rank(tmp_path: Path) -> None:
    exchange(tmp_path)
    (tmp_path / "nccl-2-12.ring").unlink()
    found = measured(tmp_path)
    (link,) = [link for link in found.links if link.rank == 1 and link.is_send]
    assert (link.peer, link.comm_peer, link.inside_host) == (None, 2, None)
    assert found.unknown_bytes == 25_000


def test_other_traces_have_no_measures_of_nccl(tmp_path: Path) -> None:
    exchange(tmp_path)
    trace = open_trace(tmp_path)
    trace.path = tmp_path / "elsewhere"
    assert analyze(trace).nccl is None
