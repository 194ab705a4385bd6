"""``ddltrace experiment calibrate``: measures what an all_reduce costs on the machines at hand.

Started on every rank as ``python -m ddltrace.experiments.calibration OUTPUT ROUNDS``.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from ddltrace.analyzer.whatif.calibration import SCHEMA
from ddltrace.experiments.harness.job_process import last_lines, ranks_launcher, run_job
from ddltrace.tracer.errors import DdltraceError

SIZES: Final = tuple(1 << power for power in range(10, 25, 2))
"""Bytes of the vectors: 1 KiB to 16 MiB."""

_WARMUP: Final = 2


def calibrate(
    ranks: int, rounds: int, timeout_s: float, *, hosts: int | None, bandwidth: str | None
) -> dict[str, Any]:
    """Measures all_reduces of several sizes on all ranks, and on two of them.

    Args:
        ranks: Number of ranks.
        rounds: Timed rounds of each size.
        timeout_s: Seconds after which the measurement is ended.
        hosts: Hosts of an emulated network, one rank each; None for this machine's own.
        bandwidth: Rate of each of its links.

    Returns:
        The calibration, as its file has it.

    Raises:
        DdltraceError: The ranks could not be started, or failed.
    """
    with tempfile.TemporaryDirectory(prefix="ddltrace-calibration-") as folder:
        output, log = Path(folder) / "points.json", Path(folder) / "log"
        start = ranks_launcher(ranks, hosts, bandwidth)
        worker = ("-m", "ddltrace.experiments.calibration", str(output), str(rounds))
        end = run_job([*start, *worker], log, timeout_s=timeout_s, environment={})
        if end.timed_out:
            raise DdltraceError(f"the calibration did not end within {timeout_s:g} s")
        if end.status != 0 or not output.exists():
            reason = f"exit status {end.status}: {last_lines(log):.300}"
            raise DdltraceError(f"the calibration failed, {reason}")
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"schema": SCHEMA, "created": created, **found}


def _rank(output: Path, rounds: int) -> None:
    """Measures on one rank; rank 0 writes the points."""
    import torch
    import torch.distributed as dist

    library = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", torch.cuda.current_device()) if library == "nccl" else None
    dist.init_process_group(library)
    everyone = dist.get_world_size()
    points = []
    for ranks in sorted({2, everyone}):
        group = dist.new_group(list(range(ranks)))
        if dist.get_rank() < ranks:
            for size in SIZES:
                tensor = torch.ones(size // 4, device=device)
                times = []
                for number in range(_WARMUP + rounds):
                    dist.barrier(group)
                    begin = time.perf_counter_ns()
                    dist.all_reduce(tensor, group=group)
                    if device is not None:
                        torch.cuda.synchronize(device)
                    if number >= _WARMUP:
                        times.append((time.perf_counter_ns() - begin) / 1e3)
                points.append({"ranks": ranks, "bytes": size, "us": statistics.median(times)})
        dist.barrier()
    if dist.get_rank() == 0:
        output.write_text(json.dumps({"library": library, "points": points}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]))
