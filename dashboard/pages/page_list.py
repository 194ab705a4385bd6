"""Every page: its address, its name, and the functions that make it and its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ddltrace.dashboard.address import EXPERIMENTS_PATH
from ddltrace.dashboard.pages import (
    communication_page,
    comparison_matrix,
    comparison_page,
    critical_path_page,
    live_page,
    overview,
    sql_page,
    tensors_page,
    traces_page,
)
from ddltrace.dashboard.pages.timeline_page import timeline_page
from ddltrace.dashboard.pages.what_if_page import PATH as WHAT_IF_PATH
from ddltrace.dashboard.pages.what_if_page import what_if_page

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from dash.development.base_component import Component

    from ddltrace.dashboard.address import Address
    from ddltrace.dashboard.workspace import OpenTrace, Workspace


_OF_ONE_TRACE: Final = frozenset(
    ("/", "/timeline", "/critical-path", "/communication", "/tensors", WHAT_IF_PATH, "/sql")
)


@dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        path: Its address.
        title: Its name in the navigation.
        make: Creates it; raises TraceError if that is not possible.
    """

    path: str
    title: str
    make: Callable[[Workspace, Address], Component]

    @property
    def name(self) -> str:
        """The attribute ``data-page`` of the page's ``<main>``."""
        return self.path.strip("/") or "overview"

    @property
    def is_of_trace(self) -> bool:
        """Whether it shows an analysis of the trace in the address."""
        return self.path in _OF_ONE_TRACE


def _of_trace(make: Callable[[OpenTrace, Address], Component]) -> Any:
    """A page of the trace in the address."""
    return lambda workspace, address: make(workspace.get(address.trace), address)


def _experiments_page(workspace: Workspace, address: Address) -> Component:
    """The page of experiments, which is imported on first use: most dashboards show none."""
    from ddltrace.dashboard.pages.experiments_page import experiments_page

    return experiments_page(workspace, address)


PAGES: Final = (
    Page("/", "Overview", _of_trace(overview.overview_page)),
    Page("/timeline", "Timeline", _of_trace(lambda opened, _: timeline_page(opened))),
    Page("/critical-path", "Critical path", _of_trace(critical_path_page.critical_path_page)),
    Page("/communication", "Communication", _of_trace(communication_page.communication_page)),
    Page("/tensors", "Tensors", _of_trace(tensors_page.tensors_page)),
    Page(WHAT_IF_PATH, "What if", _of_trace(what_if_page)),
    Page(
        "/compare",
        "Compare",
        comparison_page.compare_page,
    ),
    Page(EXPERIMENTS_PATH, "Experiments", _experiments_page),
    Page("/sql", "SQL", _of_trace(sql_page.sql_page)),
    Page(live_page.PATH, "Live", live_page.live_page),
    Page("/traces", "Traces", lambda workspace, _: traces_page.traces_page(workspace)),
)


def _without_address(
    make: Callable[[OpenTrace], go.Figure | None],
) -> Callable[[OpenTrace, Address], go.Figure | None]:
    return lambda opened, _: make(opened)


_OF_TRACE: Final[dict[str, Callable[[OpenTrace, Address], go.Figure | None]]] = {
    **{name: _without_address(make) for name, make in overview.FIGURES.items()},
    **critical_path_page.FIGURES,
    **communication_page.FIGURES,
    **tensors_page.FIGURES,
    **sql_page.FIGURES,
}
_BY_ADDRESS: Final = frozenset((*tensors_page.FIGURES, *sql_page.FIGURES))
"""Figures that depend on more of the address than the trace; they are not cached."""


def page_at(path: str) -> Page | None:
    """The page of an address; None if there is none."""
    path = path.rstrip("/") or "/"
    return next((page for page in PAGES if page.path == path), None)


def make_figure(workspace: Workspace, name: str, address: Address) -> go.Figure | None:
    """A page's figure by its name; None if the traces have no data for it.

    Raises:
        TraceError: A trace or an experiment cannot be read.
    """
    if (make := _OF_TRACE.get(name)) is not None:
        opened = workspace.get(address.trace)
        if name in _BY_ADDRESS:
            return make(opened, address)
        return opened.figure(name, lambda o: make(o, address))
    if (of_pair := comparison_page.FIGURES.get(name)) is not None:
        pair = (workspace.get(address.number("a", 0)), workspace.get(address.number("b", 1)))
        return of_pair(pair)
    if (of_all := comparison_matrix.FIGURES.get(name)) is not None:
        return of_all(workspace)
    if workspace.experiments:
        from ddltrace.dashboard.pages.experiments_page import FIGURES

        if (of_experiment := FIGURES.get(name)) is not None:
            return of_experiment(workspace.experiment(address.number("experiment", 0)))
    return None
