"""The catalogue of all techniques, along the axes on which they combine.

The axes are those of Dong & Ouyang, "Optimization Techniques of Network Communication in
Distributed Deep Learning Systems", ZTE Technology Journal, 2020, with the optimizer's own rule
added. CONTRIBUTING.md names the places of a new technique.
"""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.architectures import entries as architectures
from ddltrace.experiments.codecs import entries as codecs
from ddltrace.experiments.frequency import entries as frequency
from ddltrace.experiments.optimizer_rules import entries as optimizer_rules
from ddltrace.experiments.parallelism import entries as parallelism
from ddltrace.experiments.schedules import entries as schedules
from ddltrace.experiments.synchronization import entries as synchronization
from ddltrace.experiments.technique import Technique
from ddltrace.experiments.transports import entries as transports

AXES: Final = (
    "frequency",
    "volume",
    "order",
    "optimizer",
    "parallelism",
    "architecture",
    "synchronization",
    "transport",
    "network",
)
"""The axes: frequency, volume, order, optimizer, parallelism, architecture, synchronization,
transport, network."""

TECHNIQUES: Final = (
    Technique("frequency", "every-step", "exchange after every backward pass"),
    *frequency.TECHNIQUES,
    Technique("volume", "none", "gradients are sent unchanged"),
    *codecs.TECHNIQUES,
    *schedules.TECHNIQUES,
    Technique("optimizer", "as-is", "the job's own optimizer"),
    *optimizer_rules.TECHNIQUES,
    *parallelism.TECHNIQUES,
    Technique("architecture", "library", "the transport's own all_reduce"),
    *architectures.TECHNIQUES,
    *synchronization.TECHNIQUES,
    *transports.TECHNIQUES,
    Technique("network", "as-is", "the network of this machine"),
    Technique(
        "network",
        "emulated",
        "a namespace per rank behind a shaped link: --hosts N --bandwidth RATE",
    ),
)
