"""Trains a small GPT under several splits. Usage: JOB OUTPUT WORKLOAD:SPEC..."""

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ddltrace.experiments.harness.worker import StrategyTraining
from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.workloads import create

STEPS = 4


def train(workload_name, spec):
    """The loss of each step, the parameters at the end on rank 0, and the split's findings."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    workload = create(workload_name, width=8, batch_size=4, seed=0)
    strategy = parse(spec)
    if strategy.parallelism is None:
        training = StrategyTraining(workload, 0.002, strategy)
    else:
        training = strategy.parallelism.split(workload, 0.002)
    batches = [
        workload.batches(each, ranks)
        for each in (range(ranks) if training.needs_all_examples else [rank])
    ]
    losses = []
    for _ in range(STEPS):
        inputs, targets = (torch.cat(part) for part in zip(*map(next, batches), strict=True))
        loss = training.step(inputs, targets)
        losses.append(None if loss is None else float(loss))
    training.join()
    everyone = [None] * ranks
    dist.all_gather_object(everyone, losses)
    known = [[loss for loss in step if loss is not None] for step in zip(*everyone, strict=True)]
    parameters = torch.cat([p.detach().reshape(-1) for p in workload.model.parameters()])
    return [sum(step) / len(step) for step in known], parameters, training.findings


torch.set_num_threads(1)
dist.init_process_group("gloo")
report = {}
references = {}
for text in sys.argv[2:]:
    workload, _, spec = text.partition(":")
    if workload not in references:
        references[workload] = train(workload, "ddp")
    losses, parameters, findings = train(workload, spec)
    expected, own, _ = references[workload]
    report[text] = {
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "parameters": float((parameters - own).abs().max()),
        "digest": hashlib.sha256(parameters.numpy().tobytes()).hexdigest(),
        "findings": findings,
    }
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(report))
dist.destroy_process_group()
