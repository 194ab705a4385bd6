"""URLs of stores, such as ``s3://bucket/run``, which never carry credentials."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from ddltrace.tracer.errors import UsageError

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OPTIONS: Final = (
    *("endpoint_override", "scheme", "region", "anonymous", "retry_limit_seconds"),
    *("project_id", "replication", "buffer_size", "default_block_size"),
)
"""Parameters that a URL may have. None of them is a secret."""


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
    try:
        parts = urlsplit(text)
        options = tuple(parse_qsl(parts.query, keep_blank_values=True))
    except ValueError as error:
        raise UsageError("the URL of the trace is not valid") from error
    scheme = parts.scheme.lower()
    user, at, host = parts.netloc.rpartition("@")
    shown = f"{scheme}://{host}{parts.path}"
    # Only HDFS has user names without a secret.
    if at and (":" in unquote(user) or scheme not in ("hdfs", "viewfs")):
        raise UsageError(
            f"{shown}: a URL must not hold credentials: leave out what is before the @, and give "
            "the credentials to the store's own library (such as AWS_PROFILE or ~/.aws)"
        )
    unknown = [name for name, _ in options if name not in _OPTIONS]
    if unknown:
        raise UsageError(
            f"{shown}: the URL has a parameter that is not known here: only "
            f"{', '.join(_OPTIONS)} are (credentials never belong in a URL)"
        )
    place = (parts.netloc + parts.path).rstrip("/")
    if not place.strip("/"):
        raise UsageError(f"{shown}: the URL names no bucket or directory")
    return StoreUrl(scheme, place, options)
