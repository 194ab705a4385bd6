"""Parallel dimensions of process groups, by what frameworks call the groups.

PyTorch keeps a description of each group. A dimension of a device mesh describes its groups as
``mesh_`` and its name (``torch/distributed/device_mesh.py``, PyTorch 2.13), so the words below are
those of descriptions and of mesh dimensions. The tracer adds such names to the description of the
default group, where a mesh uses it for a dimension (``default_pg, mesh_tp``).

- Megatron-LM and NeMo, ``megatron/core/parallel_state.py`` (commit 00caa53af309):
  ``TENSOR_MODEL_PARALLEL_GROUP``, ``DATA_PARALLEL_GROUP_WITH_CP``, ``EXPERT_MODEL_PARALLEL_GROUP``.
- torchtitan, ``torchtitan/distributed/parallel_dims.py`` (commit 0119de156de5, and its later names
  ``batch``, ``loss``, ``fsdp``, ``efsdp``): ``dp_replicate``, ``dp_shard_cp``, ``tp``, ``pp``.
- DeepSpeed, ``deepspeed/utils/groups.py`` (commit 0899bfad0257): ``data_parallel``,
  ``sequence_parallel``, ``tensor_parallel``. Its other groups have no description.
- PyTorch's tutorials of hybrid sharding: ``replicate``, ``shard``.
"""

from __future__ import annotations

import re
from typing import Final

DATA: Final = "data"
UNKNOWN: Final = "unknown"

_WORDS: Final = {
    DATA: (
        *("dp", "ddp", "fsdp", "hsdp", "efsdp", "edp", "data"),
        *("replicate", "replica", "shard", "batch", "loss"),
    ),
    "tensor": ("tp", "etp", "tensor"),
    # The embedding's gradients are summed over the first and the last stage.
    "pipeline": ("pp", "pipe", "pipeline", "embd", "embedding"),
    "expert": ("ep", "expert", "moe"),
    # DeepSpeed's Ulysses splits sequences as well. Megatron's sequence parallelism has no groups.
    "context": ("cp", "context", "sp", "seq", "sequence", "ulysses"),
}
_DIMENSION_OF: Final = {word: name for name, words in _WORDS.items() for word in words}

_ANY_MODEL: Final = frozenset({"model", "mp"})
"""Alone they stand for tensor parallelism in some frameworks, for more than that in Megatron-LM."""

_WHOLE: Final = {
    # Megatron-LM's token dispatchers for experts use it.
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "expert",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": UNKNOWN,
}
_OWN: Final = "ddltrace:"
_FILLING: Final = re.compile(r"parallel(ism)?|groups?", re.IGNORECASE)
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


def dimension_of(description: str) -> str | None:
    """Returns the parallel dimension of a group: a name of the table or `UNKNOWN`.

    Data parallelism that shares its groups with context or expert parallelism is data parallelism:
    gradients are summed over both. Tensor parallelism of experts is tensor parallelism.

    Args:
        description: Of the group.

    Returns:
        `UNKNOWN` for several dimensions; None if the description names none, as that of the
        default group.
    """
    if description in _WHOLE:
        return _WHOLE[description]
    if description.startswith(_OWN):
        return None
    words = {word.lower() for word in _WORD.findall(_FILLING.sub(" ", description))}
    found = {_DIMENSION_OF[word] for word in words & _DIMENSION_OF.keys()}
    if DATA in found:
        found -= {"context", "expert"}
    elif "tensor" in found:
        found -= {"expert"}
    if len(found) == 1:
        return found.pop()
    return UNKNOWN if found or words & _ANY_MODEL else None
