"""Measures the speed of codecs, compared with a memory copy of the same size.

Prints one row for each codec: GB of float32 input for each second of a core's time, for
encoding and decoding; the share of a copy's speed that encoding reaches; and input bytes divided
by payload bytes. Processor time is measured, so that a busy machine does not count.
The goal is 1 GB/s for every codec except top-k, DGC and PowerSGD, whose goal is 0.3: a codec
that is slower than its network saves nothing.

With ``--message`` it measures one message of many small tensors instead, the 167 parameters of
ResNet-56 (He et al., arXiv 1512.03385; 0.86 million elements): processor time of one of 4 and of 32
ranks to encode and decode all that it sends and receives, and the number of torch's operations.
Most tensors are so small that calls cost more than arithmetic.

Use::

    python benchmarks/codecs.py [--megabytes 16] [--threads 1] [--message] [SPEC ...]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence

import torch
from codec_messages import LoopbackMessage, Operations, resnet_shapes

from ddltrace.experiments.codecs import create
from ddltrace.experiments.codecs.codec import Codec

SPECS = (
    *("fp16", "bf16", "int8:block=256", "onebit", "onebit+feedback", "signsgd"),
    *("int8:block=256+feedback", "signsgd+feedback", "qsgd:s=1", "qsgd:s=2", "qsgd:s=4"),
    *("qsgd:s=4+feedback", "qsgd:s=127", "qsgd:s=500", "ternary", "ternary+feedback"),
    *("randomk:density=0.01", "randomk:density=0.01+feedback", "doublesqueeze"),
    *("topk:density=0.01", "topk:density=0.01+feedback", "topk:density=0.001+feedback"),
    *(
        "topk:density=0.01,chunk=4096,bits=2+feedback",
        "dgc:density=0.001",
        "powersgd:rank=1",
        "powersgd:rank=4+feedback",
    ),
)
_SLOW = ("topk", "dgc", "powersgd")
_GOAL, _SLOW_GOAL = 1.0, 0.3
_ROUNDS = 7
_RANKS = (4, 32)


def core_seconds(work: Callable[[], object]) -> float:
    """Processor time of the shortest of some runs, after one that warms up."""
    work()
    shortest = math.inf
    for _ in range(_ROUNDS):
        begin = time.process_time()
        work()
        shortest = min(shortest, time.process_time() - begin)
    return shortest


def print_messages(specs: Sequence[str]) -> None:
    """Prints one row for each codec."""
    shapes = resnet_shapes()
    elements = sum(math.prod(shape) for shape in shapes)
    print(f"one message of {len(shapes)} tensors, {elements} elements; one rank's processor time")
    print(f"{'codec':32}" + "".join(f" {f'{n} ranks':>10} {'operations':>10}" for n in _RANKS))
    for spec in specs:
        row = f"{spec:32}"
        for ranks in _RANKS:
            message = LoopbackMessage(spec, ranks, shapes)
            seconds = core_seconds(message.run)
            with Operations() as operations:
                message.run()
            row += f" {1000 * seconds:7.1f} ms {operations.count:10}"
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="*", default=SPECS, metavar="SPEC")
    parser.add_argument("--megabytes", type=float, default=16, help="size of the float32 tensor")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--message", action="store_true", help="measure many small tensors")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.message:
        print_messages(options.specs)
        return
    side = max(8, math.isqrt(int(options.megabytes * 1e6 / 4)))
    tensor = torch.randn(side, side)
    size = tensor.numel() * 4
    target = torch.empty_like(tensor)
    copy = size / 1e9 / core_seconds(lambda: target.copy_(tensor))
    print(f"memory copy of {size / 1e6:.1f} MB: {copy:.2f} GB/s a core, {options.threads} threads")
    print(f"{'codec':32} {'encode':>8} {'decode':>8} {'of copy':>8} {'ratio':>8}  goal")
    for spec in options.specs:
        print_row(spec, create(spec, seed=1), tensor, copy)


def print_row(spec: str, codec: Codec, tensor: torch.Tensor, copy: float) -> None:
    size = tensor.numel() * 4
    payload = codec.encode(tensor)
    encode = size / 1e9 / core_seconds(lambda: codec.encode(tensor))
    decode = size / 1e9 / core_seconds(lambda: codec.decode(payload))
    goal = _SLOW_GOAL if spec.startswith(_SLOW) else _GOAL
    verdict = "met" if min(encode, decode) >= goal else "missed"
    ratio = size / payload.nbytes
    print(
        f"{spec:32} {encode:8.2f} {decode:8.2f} {encode / copy:8.1%} {ratio:8.1f}  "
        f"{goal} GB/s {verdict}"
    )


if __name__ == "__main__":
    main()
