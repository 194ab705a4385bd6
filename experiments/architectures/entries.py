"""The architectures: the architecture axis of the catalogue."""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.architectures.auto import Auto
from ddltrace.experiments.architectures.double_tree import DoubleTree
from ddltrace.experiments.architectures.halving_doubling import HalvingDoubling
from ddltrace.experiments.architectures.hierarchical import Hierarchical
from ddltrace.experiments.architectures.mesh import Mesh
from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.architectures.ring import Ring
from ddltrace.experiments.architectures.tree import Tree
from ddltrace.experiments.technique import Technique

_AXIS: Final = "architecture"

TECHNIQUES: Final = (
    Technique(
        _AXIS,
        "ring",
        "reduce-scatter and all-gather around a ring: 2 (p - 1) rounds of p messages of n / p",
        "Patarasuk and Yuan, JPDC 2009",
        Ring,
    ),
    Technique(
        _AXIS,
        "halving_doubling",
        "recursive halving and doubling between pairs, on any number of ranks",
        "Thakur et al., IJHPCA 2005",
        HalvingDoubling,
    ),
    Technique(
        _AXIS,
        "tree",
        "up and down a binomial tree: 2 (p - 1) messages of n",
        "Thakur et al., IJHPCA 2005",
        Tree,
    ),
    Technique(
        _AXIS,
        "double_tree",
        "two binary trees, each for one half: 4 (p - 1) messages of n / 2",
        "Sanders et al., Parallel Computing 2009",
        DoubleTree,
    ),
    Technique(
        _AXIS,
        "mesh",
        "all to all, in two rounds of p (p - 1) messages of n / p",
        "direct reduce-scatter and all-gather",
        Mesh,
    ),
    Technique(
        _AXIS,
        "hierarchical",
        "reduces inside each host, all-reduces between hosts, spreads inside each host",
        "Horovod's hierarchical all-reduce, arXiv 1802.05799",
        Hierarchical,
    ),
    Technique(
        _AXIS,
        "ps",
        "parameter server: workers push keys to servers and pull their sums",
        "Parameter Server, OSDI 2014",
        ParameterServer,
    ),
    Technique(
        _AXIS,
        "auto",
        "measures the links, groups ranks into hosts, and takes the cheapest plan for each size",
        "alpha-beta model: Hockney, Parallel Computing 1994",
        Auto,
    ),
)
