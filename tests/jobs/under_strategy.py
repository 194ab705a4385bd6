"""A job that knows nothing of strategies: no_sync, clipping, a schedule of rates, checkpoints.

Usage: under_strategy.py OUTPUT, which gets a digest of everything of every rank.
"""

import hashlib
import io
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 20


class Tied(nn.Module):
    """Batch normalization, attention, tied weights, a branch that not every step uses."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.branch = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.uses_branch = True

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = self.norm(hidden.flatten(0, 1))
        if self.uses_branch:
            hidden = hidden + self.branch(hidden)
        return self.head(hidden)


def digest(state):
    """A fingerprint of everything in a state dict, to the last bit."""
    buffer = hashlib.sha256()
    for key, value in sorted(state.items()):
        buffer.update(key.encode() + value.detach().contiguous().numpy().tobytes())
    return buffer.hexdigest()


def train(kind):
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(Tied(), find_unused_parameters=True)
    optimizer = {
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "clipped": lambda p: torch.optim.AdamW(p, lr=0.01),
        "scaled": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }[kind](model.parameters())
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaled", init_scale=1024.0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    digests = []
    for step in range(STEPS):
        tokens = torch.randint(0, 12, (4, 6), generator=generator)
        model.module.uses_branch = step % 4 != dist.get_rank()
        optimizer.zero_grad()
        if step % 5 == 0:
            with model.no_sync():
                nn.functional.cross_entropy(model(tokens), tokens.flatten()).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "scaled"):
            loss = nn.functional.cross_entropy(model(tokens), tokens.flatten())
        scaler.scale(loss).backward()
        if kind == "clipped":
            digests.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item().hex())
        scaler.step(optimizer)
        scaler.update()
        rates.step()
        digests.append(loss.item().hex())
        if step == STEPS // 2:  # a checkpoint, and on from it
            checkpoint = io.BytesIO()
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint
            )
            checkpoint.seek(0)
            state = torch.load(checkpoint)
            assert all(key.startswith("module.") for key in state["model"])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            digests.append(digest(state["model"]))
    # Only one rank evaluates, while the others continue.
    model.eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            digests.append(model.module(tokens).sum().item().hex())
    digests.append(digest(model.state_dict()))
    return digests


torch.set_num_threads(1)
dist.init_process_group("gloo")
found = {kind: train(kind) for kind in ("momentum", "adam", "clipped", "scaled")}
Path(sys.argv[1] + f".{dist.get_rank()}").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
