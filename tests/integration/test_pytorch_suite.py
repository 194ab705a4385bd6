"""Some of PyTorch's own distributed tests end traced as untraced; the benchmark runs all."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from support.jobs import run
from support.sampling import sampled

SUITE = Path(__file__).resolve().parents[2] / "benchmarks" / "pytorch_suite.py"
TESTS = sampled(
    [
        "test_all_reduce_coalesced_sum",
        "test_batch_isend_irecv_gloo_tags",
        "test_ddp_buffer_hook_allreduce_return_future",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_send_recv_any_source_torch_profiler",
        "test_send_recv_with_tag",
        "test_undefined_grad_parity_unused_parameters",
    ],
    4,
)


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("expecttest") is None, reason="expecttest is not installed"
)
def test_a_part_of_pytorchs_own_tests(tmp_path: Path) -> None:
    command = [sys.executable, str(SUITE), "--world-size", "4", *TESTS]
    done = run(command, cwd=tmp_path, timeout=280)
    assert done.status == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.endswith(f"0 of {len(TESTS)} outcomes changed by the tracer\n")
