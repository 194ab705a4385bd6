"""A path or URL as an argument of a command."""

from __future__ import annotations

from typing import Any

import click

from ddltrace.tracer.errors import DdltraceError
from ddltrace.tracer.storage.location import Location, location_of


class LocationType(click.ParamType[Any]):
    """A path or URL on the command line."""

    name = "path"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Location:
        """Reads the path or URL."""
        try:
            return location_of(value)
        except DdltraceError as error:
            self.fail(str(error), param, ctx)
