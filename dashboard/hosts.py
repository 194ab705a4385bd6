"""Checks the host that a request to the dashboard names."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flask import Response


def is_loopback(host: str) -> bool:
    """Whether a host name or address refers to this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(header: str) -> str:
    """The host in a ``Host`` header, without its port and brackets, in lower case."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def check_host() -> Response | None:
    """Rejects a request that names another host.

    A foreign page can let its own name resolve to 127.0.0.1 and so read from a local server (DNS
    rebinding). The browser then still sends the foreign name.

    Returns:
        None if the request is allowed, else a response with status 403.
    """
    from flask import Response, request

    if is_loopback(host_of(request.headers.get("Host", ""))):
        return None
    return Response(
        "This dashboard answers on this machine only; start it with --host to change that.\n",
        status=403,
        mimetype="text/plain",
    )
