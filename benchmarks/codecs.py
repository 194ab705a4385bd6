"""Measures the speed of codecs, compared with a memory copy of the same size.

Prints one row for each codec: GB of float32 input for each second of a core's time, for
encoding and decoding, and input bytes divided by payload bytes. A round measures all codecs in
turn; a row has the median of the rounds with the lowest and the highest. Processor time is
measured, so that a busy machine does not count.
The goal is 1 GB/s for every codec except top-k, DGC and PowerSGD, whose goal is 0.3: a codec
that is slower than its network saves nothing.

Without codecs on the command line it measures all of them and writes a section of
docs/experiments.md; what was measured stays in benchmarks/results/codecs.json.

With ``--message`` it measures one message of many small tensors instead, the 167 parameters of
ResNet-56 (He et al., arXiv 1512.03385; 0.86 million elements): processor time of one of 4 and of 32
ranks to encode and decode all that it sends and receives, and the number of torch's operations.
Most tensors are so small that calls cost more than arithmetic.

Use::

    python benchmarks/codecs.py [--megabytes 16] [--threads 1] [--rounds 3] [--message] [SPEC ...]
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from codec_messages import LoopbackMessage, Operations, resnet_shapes
from measured_files import over_rounds
from page_section import RESULTS, write_section

from ddltrace.experiments.codecs import create

SPECS = (
    *("fp16", "bf16", "int8:block=256", "onebit", "onebit+feedback", "signsgd"),
    *("int8:block=256+feedback", "signsgd+feedback", "qsgd:s=1", "qsgd:s=2", "qsgd:s=4"),
    *("qsgd:s=4+feedback", "qsgd:s=127", "qsgd:s=500", "ternary", "ternary+feedback"),
    *("randomk:density=0.01", "randomk:density=0.01+feedback", "doublesqueeze"),
    *("fp8", "fp8:form=e5m2", "int4", "thc"),
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
_RUNS = 7
_RANKS = (4, 32)


def core_seconds(work: Callable[[], object]) -> float:
    """Processor time of the shortest of some runs, after one that warms up."""
    work()
    shortest = math.inf
    for _ in range(_RUNS):
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
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="default: all, for the page")
    parser.add_argument("--megabytes", type=float, default=16, help="size of the float32 tensor")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--rounds", type=int, default=3, help="of all codecs in turn")
    parser.add_argument("--message", action="store_true", help="measure many small tensors")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.message:
        print_messages(options.specs or SPECS)
        return
    results = measure(options.specs or SPECS, options)
    text = section(results)
    print(text)
    if not options.specs:
        (RESULTS / "codecs.json").write_text(json.dumps(results) + "\n", encoding="utf-8")
        write_section("codecs", text)


def measure(specs: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Speeds of encoding and decoding in each round (GB/s), and the size of payloads."""
    side = max(8, math.isqrt(int(options.megabytes * 1e6 / 4)))
    tensor = torch.randn(side, side)
    size = tensor.numel() * 4
    target = torch.empty_like(tensor)

    def speed(work: Callable[[], object]) -> float:
        return size / 1e9 / core_seconds(work)

    codecs = {spec: create(spec, seed=1) for spec in specs}
    payloads = {spec: codec.encode(tensor) for spec, codec in codecs.items()}
    copies: list[float] = []
    rows: dict[str, Any] = {
        spec: {"encode": [], "decode": [], "ratio": size / payload.nbytes}
        for spec, payload in payloads.items()
    }
    for _ in range(options.rounds):
        copies.append(speed(lambda: target.copy_(tensor)))
        for spec, codec in codecs.items():
            rows[spec]["encode"].append(speed(partial(codec.encode, tensor)))
            rows[spec]["decode"].append(speed(partial(codec.decode, payloads[spec])))
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "bytes": size,
        "threads": options.threads,
        "rounds": options.rounds,
        "copy": copies,
        "codecs": rows,
    }


def section(results: dict[str, Any]) -> str:
    """The measurements, in Markdown."""
    lines = [
        "## Speed of codecs",
        "",
        f"`benchmarks/codecs.py` on {results['date']} with torch {results['torch']}: "
        f"{results['bytes'] / 1e6:.1f} MB of float32, torch's threads: {results['threads']}, "
        "processor time. "
        f"Rounds of all codecs in turn: {results['rounds']}; median with the lowest and the "
        f"highest. A memory copy in the same rounds reached {over_rounds(results['copy'], 1)} "
        f"GB/s. Goal: {_GOAL:g} GB/s, for top-k, DGC and PowerSGD {_SLOW_GOAL:g} GB/s.",
        "",
        "| codec | encode GB/s | decode GB/s | input / payload bytes | goal |",
        "|---|---|---|---|---|",
    ]
    for spec, row in results["codecs"].items():
        goal = _SLOW_GOAL if spec.startswith(_SLOW) else _GOAL
        slowest = min(statistics.median(row[work]) for work in ("encode", "decode"))
        lines.append(
            f"| `{spec}` | {over_rounds(row['encode'], 2)} | {over_rounds(row['decode'], 2)} "
            f"| {row['ratio']:.1f} | {'reached' if slowest >= goal else 'missed'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
