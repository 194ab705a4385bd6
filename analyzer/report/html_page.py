"""The common page of all HTML reports: one file that contains style, script and plotly.js.

The template of a report extends ``page.html.jinja`` and escapes every name; names in figures are
escaped when the figures are created. The file contains plotly.js in compressed form, and the
browser decompresses it.
"""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddltrace.analyzer.formatting.units import (
    bandwidth_text,
    bytes_text,
    printable,
    share_text,
    time_text,
)
from ddltrace.analyzer.report.palette import style_sheet
from ddltrace.tracer.errors import DdltraceError
from ddltrace.tracer.storage.plain_files import replacing

if TYPE_CHECKING:
    import jinja2

_OWN: Final = "ddltrace.analyzer.report"


def page_environment(package: str) -> jinja2.Environment:
    """Returns the template environment that renders a report.

    Args:
        package: The package in whose folder ``assets`` the report's template is.

    Returns:
        An environment with the filters `shown`, `time`, `bytes`, `share` and `bandwidth`.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(
            lambda name: _asset(_OWN if name == "page.html.jinja" else package, name)
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters.update(
        shown=printable,
        time=time_text,
        bytes=bytes_text,
        share=share_text,
        bandwidth=bandwidth_text,
    )
    return environment


def page_parts(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the variables of ``page.html.jinja``.

    Args:
        data: What the page's script draws: ``figures`` by name, and the critical paths if there
            are any.
    """
    return {
        "css": _safe(f"{style_sheet()}\n{_asset(_OWN, 'report.css')}"),
        "script": _safe(_asset(_OWN, "report.js")),
        "plotly": _safe(_packed_plotly()),
        "data": _safe(json_in_html(data)),
    }


def write_page(text: str, path: Path) -> None:
    """Writes a report; an existing file is replaced atomically.

    Raises:
        DdltraceError: The file cannot be written.
    """
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise DdltraceError(f"{path} cannot be written: {error.strerror}") from error


def json_in_html(value: Any) -> str:
    """Encodes JSON so that it cannot close the script element that contains it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(package: str, name: str) -> str:
    return (resources.files(package) / "assets" / name).read_text(encoding="utf-8")


@cache
def _packed_plotly() -> str:
    """plotly.js, gzipped, in base64: 2 MB in place of 4.8."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode("ascii")


def _safe(text: str) -> Any:
    """Marks our own text as markup for the template."""
    import markupsafe

    return markupsafe.Markup(text)
