"""The exchange of times: what it makes of a job that ends before its ranks have met."""

from __future__ import annotations

import subprocess
import sys
import time

import torch.distributed as dist

from ddltrace.tracer.timing.clock_exchange import ClockClient, ClockServer
from ddltrace.tracer.timing.clocks import clock_domain
from ddltrace.tracer.trace.run_info import RankInfo

_SERVER = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def _rank(rank: int) -> RankInfo:
    return RankInfo(rank, f"rank-{rank:05d}-0-1", world_size=2, clock_domain=clock_domain())


def test_a_store_that_ended_is_no_fault() -> None:
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdin=pipe, stdout=pipe)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    faults: list[tuple[str, Exception]] = []
    asker = ClockClient(
        _rank(1), store, lambda: None, lambda place, error: faults.append((place, error))
    )
    asker.start()
    time.sleep(0.2)  # it asks the store now where rank 0 is
    server.kill()
    server.wait()
    asker.join(10)
    assert not asker.is_alive()
    assert faults == []
    assert asker._info.clock["samples"] == []


def test_two_ranks_exchange_times() -> None:
    store = dist.HashStore()
    faults: list[tuple[str, Exception]] = []

    def fault(place: str, error: Exception) -> None:
        faults.append((place, error))

    responder = ClockServer(_rank(0), store, fault)
    asker = ClockClient(_rank(1), store, lambda: None, fault)
    responder.start()
    asker.start()
    deadline = time.monotonic() + 60
    while not asker._info.clock["samples"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert asker.stop(5)
    assert responder.stop(5)
    assert faults == []
    (sample,) = asker._info.clock["samples"]
    # Both read the same clock, so the true offset is none.
    assert abs(sample["offset_ns"]) <= sample["rtt_ns"] / 2 + 1_000
