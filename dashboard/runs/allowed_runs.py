"""The permission to run experiments from the dashboard's pages."""

from __future__ import annotations

import secrets
from pathlib import Path

from ddltrace.dashboard.runs.run_control import RunControl


class AllowedRuns:
    """The permission to run experiments from the page.

    Attributes:
        control: Starts and ends runs.
        token: A secret of this server, which is contained in its pages. A page of another origin
            can neither read it nor send the header that carries it.
    """

    def __init__(self, folder: Path) -> None:
        self.control = RunControl(folder)
        self.token = secrets.token_urlsafe(32)
