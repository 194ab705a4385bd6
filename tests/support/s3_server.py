"""A server of Amazon's S3 protocol (moto) that counts its bytes, and can be away or hang."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from pyarrow import fs
from werkzeug.serving import BaseWSGIServer, make_server

from support.jobs import free_port

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]

DENIED = (
    b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>no</Message></Error>',
    "403 Forbidden",
)
BUCKET = "bucket"


class S3Server:
    """The server. Its objects outlive `away`, and all servers of a process have the same objects.

    Attributes:
        port: Where it listens on the loopback address.
        requests: Method, path and status of each request since the last `forget`.
        sent: Bytes of the bodies of responses to GET requests of objects since then.
        denies: Whether every request is answered with "access denied".
    """

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.port = free_port()
        self.requests: list[tuple[str, str, str]] = []
        self.sent = 0
        self.denies = False
        self._application: Application = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._answers = threading.Event()
        self._answers.set()
        self._waits = threading.Event()
        self._server: BaseWSGIServer | None = None
        self.start()

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a process finds the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "key-of-the-test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def filesystem(self) -> fs.S3FileSystem:
        """A client of the test."""
        return fs.S3FileSystem(
            access_key="a",
            secret_key="b",
            scheme="http",
            endpoint_override=f"127.0.0.1:{self.port}",
            allow_bucket_creation=True,
        )

    def start(self) -> None:
        """Listens; objects of earlier times are still there."""
        self._server = make_server("127.0.0.1", self.port, self._serve, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Refuses connections from now on."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Refuses connections in the context."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Accepts requests in the context, but answers none before its end."""
        self._answers.clear()
        self._waits.clear()
        try:
            yield
        finally:
            self._answers.set()

    def wait_for_request(self) -> None:
        """Waits until a request has come since the server hangs."""
        assert self._waits.wait(60), "no request came"

    def forget(self) -> None:
        """Counts from zero."""
        with self._lock:
            self.requests.clear()
            self.sent = 0

    def methods(self, method: str, ending: str = "") -> list[str]:
        """Paths of the requests of a method whose path ends so."""
        return [path for way, path, _ in self.requests if way == method and path.endswith(ending)]

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        seen: list[str] = []
        self._waits.set()
        self._answers.wait()

        def begin(status: str, headers: Any, *rest: Any) -> Any:
            seen.append(status)
            return start_response(status, headers, *rest)

        if self.denies:
            begin(DENIED[1], [("Content-Type", "application/xml")])
            body: Iterable[bytes] = [DENIED[0]]
        else:
            body = list(self._application(environ, begin))
        with self._lock:
            self.requests.append((method, path, seen[0]))
            if method == "GET" and path.count("/") > 1:
                self.sent += sum(map(len, body))
        return body
