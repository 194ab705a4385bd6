"""How ranks find each other: what they agree on, and ranks of other versions."""

from __future__ import annotations

import json
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from ddltrace.experiments.transports.backends.meeting import connect_all, meet
from ddltrace.tracer.connections.addresses import LOOPBACK
from ddltrace.tracer.errors import MissingCapabilityError

PATIENCE = timedelta(seconds=30)


@pytest.mark.parametrize("record", [json.dumps({"version": "0.0.1", "host": "x"}), "10.0.0.1:4000"])
def test_a_rank_of_another_version_is_an_error_of_one_line(record: str) -> None:
    store = dist.HashStore()
    store.set("tcp/1", record)
    with pytest.raises(MissingCapabilityError, match="rank 1 has another version of ddl") as caught:
        meet(store, "tcp", 0, 2, PATIENCE)
    assert "\n" not in str(caught.value)


def test_each_two_ranks_of_a_host_are_connected_over_loopback_with_one_secret() -> None:
    store, ranks, each = dist.HashStore(), 3, 2
    found = {}

    def join(rank: int) -> None:
        found[rank] = connect_all(store, "x", rank, ranks, timeout=PATIENCE, each=each)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    meetings = [meeting for meeting, _ in found.values()]
    assert len(set(meetings)) == 1
    assert (meetings[0].address, meetings[0].shares_host) == (LOOPBACK, True)
    for rank, (_, lines) in found.items():
        assert set(lines) == set(range(ranks)) - {rank}
        for peer, own in lines.items():
            for index, line in enumerate(own):
                # The same connection has the same place at both ends.
                assert line.getpeername() == found[peer][1][rank][index].getsockname()
    for _, lines in found.values():
        for own in lines.values():
            for line in own:
                line.close()
