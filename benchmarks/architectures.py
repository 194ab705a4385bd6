"""Compares architectures of an all-reduce over bandwidths and sizes, on emulated hosts.

    sudo python benchmarks/architectures.py                       # about 7 minutes
    python benchmarks/architectures.py --report-only              # only write the section again

Four workers and two servers, each on a host of its own: flat networks of three rates, and two racks
of workers behind uplinks that carry a quarter of what the rack's hosts can send (4:1). Each plan is
executed by plain sends and receives on Gloo; a round runs all plans of a size in turn. Servers of
`ps:servers=S` are hosts without a worker; `ps:sharded=true` is also measured with keys that are
placed so that one server has 2 or 4 times the mean load. Writes its section of docs/experiments.md.
What was measured stays in benchmarks/results/; a network that has a file there is not measured
again. Needs root, iproute2 and an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from measured_files import measured, over_rounds
from page_section import PAGE, RESULTS, write_image, write_section
from svg_plots import Bar, bars

from ddltrace.experiments.architectures.hierarchical import LEVELS, Hierarchical, hosts_of
from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.architectures.transfers import Ownership, Round, even_bounds
from ddltrace.experiments.network.topology import Topology, topology

WORKERS: Final = 4
SERVERS: Final = 2
RACK: Final = 2
_ELEMENT_BYTES: Final = 4
_WARMUP: Final = 1
# A full Ethernet frame of 1514 bytes carries 1448 bytes of TCP with time stamps.
_FRAME_SHARE: Final = 1514 / 1448


@dataclass(frozen=True)
class Network:
    """An emulated network.

    Attributes:
        title: Its name in tables.
        options: Options of the launcher, by name.
    """

    title: str
    options: dict[str, str]

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return "-".join(self.options.values())

    @property
    def topology(self) -> Topology:
        """Its hosts and racks."""
        named = {key.replace("-", "_"): value for key, value in self.options.items()}
        if "hosts_per_rack" in named:
            named["hosts_per_rack"] = int(named["hosts_per_rack"])
        return topology(hosts=WORKERS + SERVERS, **named)


NETWORKS: Final = (
    Network("100 Mbit/s", {"bandwidth": "100mbit"}),
    Network("400 Mbit/s", {"bandwidth": "400mbit"}),
    Network("1 Gbit/s", {"bandwidth": "1gbit"}),
    Network(
        "400 Mbit/s, racks of 2, uplinks 4:1",
        {"bandwidth": "400mbit", "hosts-per-rack": str(RACK), "bandwidth-between": "200mbit"},
    ),
)


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: Its name in tables, a strategy's spec where there is one.
        plan: Makes the rounds for a number of elements.
        formula: Time on a flat network by the formula of bandwidth alone, with n bytes, p workers
            and rate B; empty if there is none.
    """

    name: str
    plan: Callable[[int], Sequence[Round]]
    formula: str = ""


def cases() -> list[Case]:
    """All rows but the one of the library and that of `auto`."""
    optimal = "2(p-1)/p n/B"
    formulas = dict.fromkeys(("ring", "halving_doubling", "mesh"), optimal)
    flat = [Case(name, _flat(name), formulas.get(name, "")) for name in LEVELS if name != "ps"]
    two_levels = [
        Case(
            f"hierarchical:inner={inner},outer={outer},ranks_per_host={RACK}",
            _two_levels(Hierarchical(inner, outer)),
        )
        for inner, outer in (("ring", "ring"), ("mesh", "mesh"))
    ]
    servers = [
        Case(
            f"ps:servers={count}",
            _push_and_pull(count),
            "2p n/B" if count == 1 else f"2p/{count} n/B",
        )
        for count in range(1, SERVERS + 1)
    ]
    sharded = [
        Case(
            "ps:sharded=true" + (f", skew {skew}" if skew > 1 else ""),
            _sharded(skew),
            f"{2 * skew}(p-1)/p n/B",
        )
        for skew in (1, 2, 4)
    ]
    return [*flat, *two_levels, *servers, *sharded]


def _flat(name: str) -> Callable[[int], Sequence[Round]]:
    return lambda elements: LEVELS[name].plan(list(range(WORKERS)), elements)


def _two_levels(architecture: Hierarchical) -> Callable[[int], Sequence[Round]]:
    return lambda elements: architecture.plan(hosts_of(list(range(WORKERS)), RACK), elements)


def _push_and_pull(count: int) -> Callable[[int], Sequence[Round]]:
    ranks = list(range(WORKERS + count))
    return lambda elements: ParameterServer(servers=count).plan(ranks, elements)


def _sharded(skew: int) -> Callable[[int], Sequence[Round]]:
    """Keys on the workers, the first of which has `skew` times the mean load."""

    def plan(elements: int) -> Sequence[Round]:
        first = elements * skew // WORKERS
        rest = even_bounds(elements - first, WORKERS - 1)
        bounds = [0, *(first + bound for bound in rest)]
        owners = [
            Ownership(start, stop, rank)
            for rank, (start, stop) in enumerate(itertools.pairwise(bounds))
            if start < stop
        ]
        server = ParameterServer(sharded=True)
        workers = list(range(WORKERS))
        return (*server.push(workers, owners), *server.pull(workers, owners))

    return plan


def modelled_us(rounds: Sequence[Round], network: Network) -> float:
    """Time of a plan by bandwidth alone: in each round, that of the busiest link.

    Args:
        rounds: The plan.
        network: Its rates.
    """
    cluster = network.topology
    rack_of = {host: rack for rack, hosts in enumerate(cluster.racks) for host in hosts}
    total = 0.0
    for transfers in rounds:
        seconds: dict[tuple[str, int], float] = {}
        for transfer in transfers:
            bits = transfer.elements * _ELEMENT_BYTES * 8 * _FRAME_SHARE
            ends = (("out", transfer.source), ("in", transfer.target))
            racks = (("up", rack_of[transfer.source]), ("down", rack_of[transfer.target]))
            for link in ends:
                seconds[link] = seconds.get(link, 0.0) + bits / cluster.bits_per_second
            if racks[0][1] != racks[1][1]:
                for link in racks:
                    rate = cluster.rate_of_rack(link[1])
                    seconds[link] = seconds.get(link, 0.0) + bits / rate
        total += max(seconds.values(), default=0.0) * 1e6
    return total


def main() -> None:
    """Measures the missing networks and writes the section."""
    options = _parse_options()
    if options.rank:
        _run_rank(options)
        return
    networks = [each for each in NETWORKS if not options.network or each.name in options.network]
    measure = None if options.report_only else partial(_measure, options)
    found = measured(networks, options.directory, _file, measure)
    write_section("architectures", _section(found, options.page), options.page)
    print(f"wrote {options.page}")


def _file(network: Network) -> str:
    return f"architectures-{network.name}"


def _measure(options: argparse.Namespace, network: Network, output: Path) -> None:
    print(f"== {network.title}", flush=True)
    arguments = [part for key, value in network.options.items() for part in (f"--{key}", value)]
    command = [
        *(sys.executable, "-m", "ddltrace.experiments.network.launch"),
        *("--hosts", str(WORKERS + SERVERS), *arguments, "--"),
        *(sys.executable, str(Path(__file__).resolve()), "--rank", "--output", str(output)),
        *("--sizes", options.sizes, "--rounds", str(options.rounds)),
    ]
    status = subprocess.run(command, check=False).returncode
    if status:
        print(f"{network.title}: not measured, exit status {status}", file=sys.stderr)


def _run_rank(options: argparse.Namespace) -> None:
    """One worker or server: measures every row at every size; rank 0 writes."""
    import torch
    import torch.distributed as dist

    from ddltrace.experiments.collectives.link_measurement import measure_links
    from ddltrace.experiments.plan_execution import PlanExecution, launches_of, rounds_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    everyone = dist.distributed_c10d._get_default_group()
    workers = dist.new_group(list(range(WORKERS)))
    links = measure_links(workers) if rank < WORKERS else None
    description = [None if links is None else links.describe()]
    dist.broadcast_object_list(description)

    def all_reduce(plan: Callable[[int], Sequence[Round]], elements: int) -> Callable[[], None]:
        rounds = rounds_of(rank, plan(elements))
        send, receive = launches_of(everyone, tag=1)

        def run() -> None:
            vector = torch.full((elements,), float(rank < WORKERS))
            PlanExecution(rounds, vector, send=send, receive=receive).wait()
            if rank < WORKERS and not bool((vector == WORKERS).all()):
                raise RuntimeError("the sum is wrong")

        return run

    def by_library(elements: int) -> Callable[[], None]:
        def run() -> None:
            if rank < WORKERS:
                dist.all_reduce(torch.ones(elements), group=workers)

        return run

    def chosen(elements: int) -> Callable[[int], Sequence[Round]]:
        # Servers have no measurements and no part in the plan.
        if links is None:
            return lambda _: ()
        name = links.choose(elements, _ELEMENT_BYTES).name
        return lambda count: links.plan(name, count)

    rows = []
    for size in map(int, options.sizes.split(",")):
        elements = size // _ELEMENT_BYTES
        runs = {"gloo's own": by_library(elements), "auto": all_reduce(chosen(elements), elements)}
        runs |= {case.name: all_reduce(case.plan, elements) for case in cases()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _, (name, run) in itertools.product(range(_WARMUP + options.rounds), runs.items()):
            dist.barrier()
            begin = time.perf_counter()
            run()
            taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            times[name].append(float(taken) * 1e6)
        rows += [
            {"name": name, "bytes": size, "us": each[_WARMUP:]} for name, each in times.items()
        ]
    if rank == 0:
        about = {"torch": torch.__version__, "rounds": options.rounds, "cpus": os.cpu_count()}
        about |= {"date": datetime.date.today().isoformat(), "auto": description[0], "rows": rows}
        options.output.write_text(json.dumps(about), encoding="utf-8")
    dist.destroy_process_group()


def _section(found: Sequence[tuple[Network, dict[str, Any]]], page: Path) -> str:
    first = found[0][1]
    by_name = {case.name: case for case in cases()}
    parts = [
        "## Architecture, bandwidth and size",
        f"`benchmarks/architectures.py` on {first['date']} with torch {first['torch']}, "
        f"{first['cpus']} cores: one all-reduce of {WORKERS} workers, each on an emulated host; "
        f"median of {first['rounds']} rounds with the shortest and the longest one; a round runs "
        "all plans in turn, each as long as its slowest worker. Servers of "
        "`ps:servers=S` are further hosts. *Skew*: load of the fullest server over the mean. "
        "*Model*: the time of the busiest link in each round, by bandwidth alone, without latency, "
        "processor time, and the bursts that the emulated links let pass at once. *Formula*: the "
        "same in closed form on a flat network, for n bytes, p workers and rate B: a ring is "
        "optimal in bandwidth (Patarasuk and Yuan, 2009), and each of S servers receives and sends "
        "p/S n bytes (Li et al., OSDI 2014).",
    ]
    largest = max(row["bytes"] for row in first["rows"])
    image = write_image("architectures", _plot(found, largest), page)
    parts.append(f"![Time of an all-reduce over that of a ring, {_size(largest)}]({image})")
    for network, results in found:
        sizes = sorted({row["bytes"] for row in results["rows"]})
        us = {(row["name"], row["bytes"]): row["us"] for row in results["rows"]}
        lines = [
            f"### {network.title}",
            "",
            "| architecture | formula | "
            + " | ".join(f"{_size(size)}: ms (model)" for size in sizes)
            + " |",
            "|---|---|" + "---|" * len(sizes),
        ]
        for name in dict.fromkeys(row["name"] for row in results["rows"]):
            cells = []
            for size in sizes:
                text = over_rounds([each / 1e3 for each in us[name, size]], 1)
                if name in by_name:
                    model = modelled_us(by_name[name].plan(size // _ELEMENT_BYTES), network)
                    text += f" ({model / 1e3:.1f})"
                cells.append(text)
            formula = by_name[name].formula if name in by_name else ""
            lines.append(f"| `{name}` | {formula} | {' | '.join(cells)} |")
        lines += ["", f"`auto` chose: {results['auto']}.", "", *_conclusions(us, sizes)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _ratio(own: Sequence[float], ring: Sequence[float]) -> float:
    """Time over the ring's in the same round: the median over rounds."""
    return statistics.median(a / b for a, b in zip(own, ring, strict=True))


def _conclusions(us: dict[tuple[str, int], list[float]], sizes: Sequence[int]) -> list[str]:
    """Who is faster than the ring, computed from the measurements."""
    lines = []
    for size in sizes:
        ring = us["ring", size]
        ratios = {
            name: _ratio(us[name, size], ring)
            for name, each in us
            if each == size and name != "ring"
        }
        servers = ", ".join(
            f"`{name}` {ratio:.2f}" for name, ratio in ratios.items() if name.startswith("ps")
        )
        levels = ", ".join(
            f"`{name}` {ratio:.2f}" for name, ratio in ratios.items() if "hierarchical" in name
        )
        lines.append(
            f"- {_size(size)}, time over the ring's in the same round, median: {servers}; {levels}."
        )
    return lines


def _plot(found: Sequence[tuple[Network, dict[str, Any]]], size: int) -> str:
    series = {}
    for network, results in found:
        us = {row["name"]: row["us"] for row in results["rows"] if row["bytes"] == size}
        series[network.title] = {name: Bar(_ratio(own, us["ring"])) for name, own in us.items()}
    return bars(f"Time over the ring's, {_size(size)}", series, "", reference=1.0)


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--sizes", default="65536,1048576,8388608", help="bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--network", action="append", choices=[network.name for network in NETWORKS]
    )
    parser.add_argument("--report-only", action="store_true", help="measure nothing")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
