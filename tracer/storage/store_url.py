"""URLs of stores, such as ``s3://bucket/run``, which never carry credentials."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, quote, unquote

from ddltrace.tracer.errors import UsageError

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OPTIONS: Final = (
    *("endpoint_override", "scheme", "region", "anonymous", "retry_limit_seconds"),
    *("project_id", "replication", "buffer_size", "default_block_size"),
)
"""Parameters that a URL may have. None of them is a secret."""
BUCKET_SCHEMES: Final = ("s3", "gs", "gcs")
"""Stores whose URLs begin with a bucket. They have no directories that must be created."""


@dataclass(frozen=True)
class StoreUrl:
    """A location in a store.

    Attributes:
        scheme: The kind of store, such as ``s3``.
        place: Bucket or host, and the path in it; without a slash at the end.
        options: Parameters of the store, such as ``endpoint_override``.
    """

    scheme: str
    place: str
    options: tuple[tuple[str, str], ...] = field(default=())

    def __str__(self) -> str:
        options = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in self.options)
        return f"{self.scheme}://{self.place}" + (f"?{options}" if options else "")

    def at(self, place: str) -> StoreUrl:
        """Another location in the same store."""
        return StoreUrl(self.scheme, place, self.options)


def is_url(text: str) -> bool:
    """Whether a text is a URL, not a local path."""
    return _URL.match(text) is not None


def parse_url(text: str) -> StoreUrl:
    """Reads the URL of a location in a store.

    Raises:
        UsageError: The URL holds credentials, or parameters that it must not have. The message
            does not repeat them.
    """
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    place, _, query = rest.partition("?")
    if not text.isprintable():
        raise UsageError("the URL of the trace is not valid: it has a character such as a newline")
    if _has_credentials(scheme, place):
        # Nothing of the rest is repeated: a secret may contain each character that ends a part.
        raise UsageError(
            f"{scheme}://...: a URL must not hold credentials: leave out what is before the @, and "
            "give the credentials to the store's own library (such as AWS_PROFILE or ~/.aws)"
        )
    if scheme in BUCKET_SCHEMES and ":" in place.partition("/")[0]:
        raise UsageError(
            f"{scheme}://...: a bucket has no port: name the store by ?endpoint_override=HOST:PORT"
        )
    options = tuple(parse_qsl(query, keep_blank_values=True))
    place = place.rstrip("/")
    shown = f"{scheme}://{place}"
    unknown = [name for name, _ in options if name not in _OPTIONS]
    if unknown:
        raise UsageError(
            f"{shown}: the URL has a parameter that is not known here: only "
            f"{', '.join(_OPTIONS)} are (credentials never belong in a URL)"
        )
    secret = next((name for name, value in options if "@" in value), None)
    if secret is not None:
        raise UsageError(f"{shown}: {secret} must not hold credentials: leave out what ends with @")
    if not place.strip("/"):
        raise UsageError(f"{shown}: the URL names no bucket or directory")
    return StoreUrl(scheme, place, options)


def _has_credentials(scheme: str, place: str) -> bool:
    """Whether the first part of a place holds credentials, or looks like a part of some."""
    host = place.partition("/")[0]
    user, at, _ = host.rpartition("@")
    # Only HDFS has user names without a secret.
    if at and (":" in unquote(user) or scheme not in ("hdfs", "viewfs")):
        return True
    # A secret with a slash or a question mark ends the host before the @; a port is a number.
    name, colon, port = host.rpartition(":")
    return bool(colon) and not name.startswith("[") and port != "" and not port.isdigit()
