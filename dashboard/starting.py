"""The WSGI application of a dashboard that is starting: requests wait for the app."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from ddltrace.dashboard.access import Access
    from ddltrace.dashboard.first_page import Answer, FirstPage


WsgiApp: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

ADMIT: Final = "ddltrace.admit"
"""Key of a function in the WSGI environment: it frees the connection from limits of strangers."""


class StartingApp:
    """Answers like the app as soon as it is there, and until then with the first page.

    Args:
        first_page: The page and its scripts; None if all requests wait.
        access: Refuses requests before anything else sees them.

    Attributes:
        first_path: The first address that was requested; None if there was no request.
    """

    def __init__(self, first_page: FirstPage | None, access: Access) -> None:
        self._first_page = first_page
        self._access = access
        self._is_decided = threading.Event()
        self._app: WsgiApp | None = None
        self.first_path: str | None = None

    def complete(self, app: WsgiApp | None) -> None:
        """Answers all requests with the app from now on; None if it could not be made."""
        self._app = app
        self._is_decided.set()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Answers a request."""
        refused = self._access.refusal(environ)
        if refused is not None:
            return _refuse(refused, environ, start_response)
        if ADMIT in environ:
            environ[ADMIT]()
        start_response = self._access.with_cookie(environ, start_response)
        if self.first_path is None:
            self.first_path = environ["PATH_INFO"]
        if not self._is_decided.is_set():
            early = self._early_answer(environ)
            if early is not None:
                start_response("200 OK", early.headers)
                return [early.body]
            self._is_decided.wait()
        if self._app is None:
            start_response("503 Service Unavailable", [("Content-Length", "0")])
            return []
        return self._app(environ, start_response)

    def _early_answer(self, environ: dict[str, Any]) -> Answer | None:
        if self._first_page is None or environ["REQUEST_METHOD"] != "GET":
            return None
        return self._first_page.answer(environ["PATH_INFO"], environ.get("QUERY_STRING", ""))


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
