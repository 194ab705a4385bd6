"""One rank of an experiment: trains a workload with one strategy and writes the outcome.

Started on every rank by `ddltrace.experiments.harness.local_ranks` or by
`ddltrace.experiments.network.launch`::

    python -m ddltrace.experiments.harness.local_ranks --ranks 2 -- \\
        -m ddltrace.experiments.harness.worker --strategy wfbp --outcome out.json
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddltrace.experiments.engine.attach import attach
from ddltrace.experiments.observation import outcomes
from ddltrace.experiments.observation.notes import reported_choices, reported_restrictions
from ddltrace.experiments.observation.peak_memory import peak_memory_bytes
from ddltrace.experiments.observation.wire_bytes import tcp_bytes_sent
from ddltrace.experiments.pacing.paced_layers import PacedLayers
from ddltrace.experiments.pacing.profile import read_profile
from ddltrace.experiments.pacing.slowdown import factor_of, read_slowdown
from ddltrace.experiments.pacing.straggler import Straggler
from ddltrace.experiments.parallelism.split_training import SplitTraining
from ddltrace.experiments.parent_process import end_with_parent
from ddltrace.experiments.strategy.plugins import load_inherited
from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.strategy.strategy import Strategy
from ddltrace.experiments.transports import protocols
from ddltrace.experiments.transports.transport import Tcp
from ddltrace.experiments.workloads import WORKLOADS, create
from ddltrace.experiments.workloads.base import Workload


def main() -> None:
    """Trains, then gathers the ranks' outcomes and lets rank 0 write them."""
    # A launcher that is killed cannot end its ranks.
    end_with_parent()
    options = _parse_options()
    if options.protocol is not None:
        os.environ[protocols.ENVIRONMENT] = options.protocol
    dist.init_process_group("gloo")
    try:
        _train(options)
    finally:
        # A group that something still refers to keeps its threads, and a thread of Gloo that
        # releases a tensor while the interpreter ends aborts the process.
        gc.collect()
        dist.destroy_process_group()


def _train(options: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    workload = create(
        options.workload, width=options.width, batch_size=options.batch_size, seed=options.seed
    )
    load_inherited()
    strategy = parse(options.strategy)
    if options.protocol is not None and strategy.transport is None:
        strategy = replace(strategy, transport=Tcp())
    training: SplitTraining
    if strategy.parallelism is None:
        training = StrategyTraining(workload, options.learning_rate, strategy)
    else:
        training = strategy.parallelism.split(workload, options.learning_rate)
    alone = strategy.synchronization is not None and strategy.synchronization.place == "servers"
    if alone:
        outcomes.started_path(options.outcome).touch()
    straggler = _straggler(options, workload.model, rank, world_size)
    if options.pace is not None:
        protocol = protocols.protocol_of_job()
        slowdown = 1.0 if protocol is None else protocol.slowdown
        PacedLayers(workload.model, read_profile(options.pace).slowed(slowdown))
    batches = [
        workload.batches(each, world_size)
        for each in (range(world_size) if training.needs_all_examples else [rank])
    ]
    losses: list[torch.Tensor | None] = []
    ends: list[int] = []
    sent_before: int | None = None
    for step in range(options.steps):
        if step == options.warmup:
            sent_before = tcp_bytes_sent()
        if straggler is not None:
            straggler.begin(step)
        # The recommender's inputs are ragged: only those of several ranks are put together.
        examples = [next(each) for each in batches]
        inputs, targets = examples[0]
        if len(examples) > 1:
            inputs, targets = (torch.cat(part) for part in zip(*examples, strict=True))
        losses.append(training.step(inputs, targets))
        ends.append(time.monotonic_ns())
    sent_after = tcp_bytes_sent()
    peak = peak_memory_bytes()
    training.join()
    sent = None
    if sent_before is not None and sent_after is not None:
        sent = (sent_after - sent_before) / (options.steps - options.warmup)
    parameters = list(workload.model.parameters())
    own: dict[str, Any] = {
        "world_size": world_size,
        "parameters": sum(p.numel() for p in parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "losses": [None if loss is None else float(loss) for loss in losses],
        "wire_bytes": sent,
        "digest": _digest(workload.model) if strategy.parallelism is None else None,
        "peak_memory": peak,
        "notes": reported_restrictions(),
        "choices": reported_choices() | _paced_messages() | training.findings,
        "step_us": [(end - begin) / 1e3 for begin, end in pairwise(ends)],
        "torch": torch.__version__,
    }
    if alone:
        # Others may have died: each rank writes for itself.
        own |= asdict(workload.score())
        part = outcomes.part_path(options.outcome, rank)
        part.write_text(json.dumps(own), encoding="utf-8")
        return
    gathered: list[dict[str, Any]] = [{}] * world_size
    dist.all_gather_object(gathered, own)
    if rank == 0:
        outcome = outcomes.merged(gathered) | asdict(workload.score())
        options.outcome.write_text(json.dumps(outcome), encoding="utf-8")


class StrategyTraining(SplitTraining):
    """Data parallelism, with a strategy in place of DDP's communication."""

    def __init__(self, workload: Workload, learning_rate: float, strategy: Strategy) -> None:
        """Attaches the strategy.

        Args:
            workload: What to train.
            learning_rate: Learning rate of its optimizer.
            strategy: What to attach.
        """
        super().__init__(workload)
        self._optimizer = workload.optimizer(learning_rate)
        self._exchange = attach(workload.model, strategy)
        self._trained = self._exchange.model

    def join(self) -> None:
        """Applies what is under way."""
        self._exchange.close()


def _paced_messages() -> dict[str, Any]:
    """The times of the messages that a profile paced on this rank."""
    protocol = protocols.protocol_of_job()
    if protocol is None:
        return {}
    # Only a paced job needs the paced groups.
    from ddltrace.experiments.transports.backends.paced_group import received

    return {"protocol": protocol.to_json() | received.to_json()}


def _straggler(
    options: argparse.Namespace, model: nn.Module, rank: int, ranks: int
) -> Straggler | None:
    """What makes this rank slow, if anything does."""
    own = [s for text in options.slow if (s := read_slowdown(text, ranks)).rank == rank]
    if not own:
        return None
    return Straggler(model, lambda step: factor_of(own, step))


def _digest(model: nn.Module) -> str:
    """A fingerprint of the parameters to the last bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one rank of an experiment")
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--outcome", required=True, type=Path)
    parser.add_argument("--workload", choices=WORKLOADS, default="digits")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--protocol")
    parser.add_argument("--slow", action="append", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
