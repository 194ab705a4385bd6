"""The strategies that test the analyzer's advice on communication: its entry point ``advice``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

_STRATEGIES: Final = {
    "merge": ("best_buckets", "fusion", "ddp"),
    "split": ("ddp:bucket_mb={amount:.2g}", "best_buckets", "ddp"),
    "halve": ("bf16", "ddp"),
    "accumulate": ("localsgd:period={amount:.0f}", "ddp"),
}


def strategies(
    change: str, amount: float, *, wrapper: str | None, all_ranks: bool
) -> tuple[str, ...]:
    """The strategies that make a change of a job's messages, and what they are compared with.

    Args:
        change: ``merge`` messages, ``split`` buckets, ``halve`` the gradients' precision, or
            ``accumulate`` gradients over several batches.
        amount: Of ``split``, MB of a bucket; of ``accumulate``, the number of batches.
        wrapper: What exchanges the job's gradients: ``ddp``, ``fsdp``, ...
        all_ranks: Whether all ranks exchange them.

    Returns:
        Their specs; empty if strategies cannot replace what exchanges the gradients: they replace
        DistributedDataParallel over all ranks.
    """
    if wrapper != "ddp" or not all_ranks:
        return ()
    return tuple(spec.format(amount=amount) for spec in _STRATEGIES[change])


def command(specs: Sequence[str], job: Sequence[str]) -> str | None:
    """The command that compares strategies in a job; None for a job of an experiment."""
    if any(word.startswith("ddltrace.experiments") for word in job):
        return None
    named = " ".join(f"--strategy {spec}" for spec in specs)
    return f"ddltrace experiment run {named} -- {shlex.join(job)}"
