#!/usr/bin/env python3
"""Measures what NCCL's profiler plugin costs per event, without a GPU and without NCCL.

A host program (`tests/nccl/host.c`) makes the calls of NCCL: batches of events of every kind that
the version of the interface has. Times are from the begin of an event to its end, with
its states; each of these calls reads the clock once, whose cost is the first line. Another plugin,
such as NVIDIA's Inspector (``plugins/profiler/inspector`` of github.com/NVIDIA/nccl), is measured
on the same calls in turns; a small library stands in for the CUDA functions that it calls::

    python benchmarks/nccl_plugin.py
    python benchmarks/nccl_plugin.py --other libnccl-profiler-inspector.so --version 5
    python benchmarks/nccl_plugin.py --soak 100000000           memory over 100 million events
    python benchmarks/nccl_plugin.py --turns 1 --batches 50     a dry run
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.nccl_host import build_host

from ddltrace.tracer.nccl.compile_plugin import compiler

_STAND_IN = """
#include <string.h>
int cuGetErrorString(int error, const char** text) { (void)error; *text = ""; return 0; }
int cuDeviceGet(int* device, int number) { *device = number; return 0; }
int cuDeviceGetUuid(void* id, int device) { memset(id, device, 16); return 0; }
int cudaGetDevice(int* device) { *device = 0; return 0; }
const char* cudaGetErrorString(int error) { (void)error; return ""; }
"""
_EVENTS_PER_COLLECTIVE = 43
"""Of the soak: 2 channels with 2 operations of 4 steps and their requests, and what is above."""


def stand_in(folder: Path) -> Path:
    """Compiles what answers for the CUDA driver."""
    source, library = folder / "stand_in.c", folder / "libcuda.so"
    source.write_text(_STAND_IN, encoding="utf-8")
    with_what = compiler()
    assert with_what is not None
    subprocess.run([with_what, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library


def environment(folder: Path, cuda: Path) -> dict[str, str]:
    """Variables for our plugin and for the Inspector, which then keeps messages of any size."""
    found = {name: value for name, value in os.environ.items() if "NCCL" not in name}
    return found | {
        "DDLTRACE_NCCL_DIR": str(folder),
        "DDLTRACE_NCCL_EVENTS": "0xffff",
        "RANK": "0",
        "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_DIR": str(folder),
        "NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES": "0",
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "1000000",
        "LD_PRELOAD": str(cuda),
        "LD_LIBRARY_PATH": f"{cuda.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }


def main() -> int:
    """Prints the cost of each kind of event, or the growth of memory."""
    options = parser().parse_args()
    host = build_host()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = environment(folder, stand_in(folder))

        def run(plugin: Path, scenario: str, number: int, version: int) -> str:
            command = [str(host.program), str(plugin), str(version), scenario, str(number)]
            done = subprocess.run(
                command, env=variables, stdout=subprocess.PIPE, text=True, check=True
            )
            for file in folder.glob("*.ring"):
                file.unlink()
            return done.stdout

        if options.soak:
            collectives = -(-options.soak // (2 * _EVENTS_PER_COLLECTIVE))
            grown = run(host.plugin, "soak", collectives, 5)
            events = 2 * collectives * _EVENTS_PER_COLLECTIVE
            print(f"{events:,} events: memory grew by {int(grown)} KiB over the second half")
            return 0
        plugins = {"ddltrace": host.plugin}
        if options.other:
            plugins[options.other.name] = options.other.resolve()
        costs: dict[str, dict[str, list[float]]] = {plugin: {} for plugin in plugins}
        for turn in range(options.turns):
            order = list(plugins.items())
            for plugin, path in order if turn % 2 else order[::-1]:
                for line in run(path, "cost", options.batches, options.version).splitlines():
                    kind, cost = line.split()
                    costs[plugin].setdefault(kind, []).append(float(cost))
    print(f"{'event':<14}" + "".join(f"{plugin:>36}" for plugin in plugins))
    for kind in costs["ddltrace"]:
        cells = []
        for plugin in plugins:
            values = costs[plugin][kind]
            middle = statistics.median(values)
            cells.append(f"{middle:.0f} ns ({min(values):.0f} to {max(values):.0f})")
        print(f"{kind:<14}" + "".join(f"{cell:>36}" for cell in cells))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--other", type=Path, help="another plugin, measured in turns")
    top.add_argument(
        "--version", type=int, default=7, choices=range(5, 8), help="of the interface (%(default)s)"
    )
    top.add_argument("--turns", type=int, default=9, help="runs of each plugin (%(default)s)")
    top.add_argument(
        "--batches", type=int, default=5000, help="batches of 32 events in a run (%(default)s)"
    )
    top.add_argument("--soak", type=int, metavar="EVENTS", help="measure the growth of memory")
    return top


if __name__ == "__main__":
    sys.exit(main())
