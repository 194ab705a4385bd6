"""Holds an analysis together with its intermediate results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddltrace.analyzer.joined.critical_path import Path
from ddltrace.analyzer.joined.executions import Executions
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.model import Analysis


@dataclass(frozen=True)
class Analyzed:
    """An analysis and its intermediate results, for further computations.

    Attributes:
        analysis: The records.
        joined: Every message, joined across ranks.
        paths: Step -> its critical path, piece by piece.
        executions: Every run of a kernel, a copy or an operator.
    """

    analysis: Analysis
    joined: Joined
    paths: Mapping[int, Path]
    executions: Executions
