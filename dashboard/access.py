"""Who may use a dashboard: whoever has its token, and only under a name of this machine.

A trace contains command lines and names, and other users of a machine reach its loopback address
as well. So the printed address contains a token; the page that it opens sets a cookie, and every
request needs one of the two.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs

TOKEN_KEY: Final = "token"
"""Key of the token in an address."""

ADMIT: Final = "ddltrace.admit"
"""Key of a function in the WSGI environment: it frees the connection from limits of strangers."""

WsgiApp: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Headers = list[tuple[str, str]]

_OTHER_HOST: Final = (
    "This dashboard answers on this machine only; start it with --host to change that.\n"
)
_NO_TOKEN: Final = (
    "This dashboard needs its token: open the address that ddltrace dashboard printed.\n"
)


class Access:
    """Decides about requests before anything of them but their headers is read.

    Args:
        token: The secret; None if everyone may use the dashboard.
        loopback: Whether the server is bound to this machine only. If so, requests that name
            another host are refused: a foreign page can let its own name resolve to 127.0.0.1 and
            so read from a local server (DNS rebinding). The browser then still sends that name.
    """

    def __init__(self, token: str | None, *, loopback: bool) -> None:
        self._token = token
        self._loopback = loopback

    def address(self, url: str) -> str:
        """The address that opens a page: with the token, if there is one."""
        return url if self._token is None else f"{url}?{TOKEN_KEY}={self._token}"

    def refusal(self, environ: dict[str, Any]) -> str | None:
        """The line that refuses a request; None if it is allowed."""
        if self._loopback and not is_loopback(host_of(environ.get("HTTP_HOST", ""))):
            return _OTHER_HOST
        if self._token is None or self._is_in_address(environ) or self._is_in_cookie(environ):
            return None
        return _NO_TOKEN

    def guard(self, app: WsgiApp) -> WsgiApp:
        """The same application, which sees no request that is refused."""

        def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            refused = self.refusal(environ)
            if refused is not None:
                return _refuse(refused, environ, start_response)
            if ADMIT in environ:
                environ[ADMIT]()
            return app(environ, self._with_cookie(environ, start_response))

        return answer

    def _with_cookie(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Sets the cookie in the response to a request whose address contains the token."""
        if self._token is None or not self._is_in_address(environ):
            return start_response
        cookie = f"{_cookie_name(environ)}={self._token}; Path=/; HttpOnly; SameSite=Strict"

        def start(status: str, headers: Headers, *rest: Any) -> Any:
            return start_response(status, [*headers, ("Set-Cookie", cookie)], *rest)

        return start

    def _is_in_address(self, environ: dict[str, Any]) -> bool:
        given = parse_qs(environ.get("QUERY_STRING", "")).get(TOKEN_KEY, [])
        return any(map(self._is_token, given))

    def _is_in_cookie(self, environ: dict[str, Any]) -> bool:
        name = _cookie_name(environ)
        pairs = (part.strip().partition("=") for part in environ.get("HTTP_COOKIE", "").split(";"))
        return any(self._is_token(value) for key, _, value in pairs if key == name)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), str(self._token).encode())


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


def _cookie_name(environ: dict[str, Any]) -> str:
    """One name for each port that the browser sees: cookies do not tell ports apart."""
    port = environ.get("HTTP_HOST", "").rpartition(":")[2]
    return f"ddltrace-{port if port.isascii() and port.isdecimal() else 80}"


def _refuse(
    line: str, environ: dict[str, Any], start_response: Callable[..., Any]
) -> Iterable[bytes]:
    body = b"" if environ["REQUEST_METHOD"] == "HEAD" else line.encode()
    headers = [
        ("Content-Type", "text/plain; charset=utf-8"),
        ("Content-Length", str(len(line.encode()))),
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
    ]
    start_response("403 Forbidden", headers)
    return [body]
