"""URLs of stores, connections to them, and their errors as one line.

A URL, such as ``s3://bucket/run``, never carries credentials.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote

from pyarrow import fs

from ddltrace.tracer.errors import (
    DdltraceError,
    MissingCapabilityError,
    NotStoredError,
    StoreError,
    UsageError,
)

_OPTIONS: Final = (
    *("endpoint_override", "scheme", "region", "anonymous", "retry_limit_seconds"),
    *("project_id", "replication", "buffer_size", "default_block_size"),
)
"""Parameters that a URL may have. None of them is a secret."""
BUCKET_SCHEMES: Final = ("s3", "gs", "gcs")
"""Stores whose URLs begin with a bucket. They have no directories that must be created."""

_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_SECRET_NAME: Final = re.compile(
    r"KEY|SECRET|TOKEN|PASSW|CREDENTIAL|CONNECTION_STRING|SIGNATURE|_SAS", re.IGNORECASE
)
_USER: Final = re.compile(r"[^/\s@]+:[^/\s@]+@")
_LEAST_SECRET: Final = 6
"""Shorter values of variables with such names are not secrets, but flags and numbers."""
_CONNECT_S: Final = 5.0
_REQUEST_S: Final = 20.0
_ATTEMPTS: Final = 3
_RETRY_S: Final = 60.0
"""For Google's library, which otherwise tries again for a quarter of an hour."""

_NO_BUCKET: Final = "there is no such bucket"
_NOT_THERE: Final = "not there"
_CAUSES: Final = (
    (r"NO_SUCH_BUCKET|NoSuchBucket|Bucket.* not found", _NO_BUCKET),
    (
        r"ACCESS_DENIED|AccessDenied|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|HTTP status 40[13]"
        r"|Permission|credential|Unauthenticated|UNAUTHENTICATED|EXPIRED_TOKEN|UNRECOGNIZED_CLIENT",
        "access denied: give credentials to the store's own library (such as AWS_PROFILE, "
        "AWS_ACCESS_KEY_ID, ~/.aws or GOOGLE_APPLICATION_CREDENTIALS)",
    ),
    (
        r"NETWORK_CONNECTION|curlCode|Couldn't connect|Could not connect|[Cc]onnection (refused|"
        r"reset)|resolve host|Name or service|timed? ?out|REQUEST_TIMEOUT|UNAVAILABLE|"
        r"SERVICE_UNAVAILABLE|HTTP status 50\d|SLOW_DOWN|INTERNAL_FAILURE",
        "the store cannot be reached",
    ),
    (
        r"NO_SUCH_KEY|RESOURCE_NOT_FOUND|NoSuchKey|HTTP status 404|No such file|not found",
        _NOT_THERE,
    ),
)


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
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        options = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in self.options)
        return f"{self.scheme}://{self.place}" + (f"?{options}" if options else "")

    @property
    def path(self) -> str:
        """The path in the store, as the file system of `connected` takes it."""
        if self.scheme in ("hdfs", "viewfs"):
            return "/" + self.place.partition("/")[2]
        return self.place

    def at(self, place: str) -> StoreUrl:
        """Another location in the same store."""
        return StoreUrl(self.scheme, place, self.options)


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


@contextlib.contextmanager
def connected(url: StoreUrl) -> Iterator[fs.FileSystem]:
    """The file system of a URL, whose errors become one line without credentials.

    All URLs of one store get the same file system.

    Raises:
        UsageError: The protocol of the URL is not known.
        MissingCapabilityError: A package is missing.
        StoreError: The store cannot be reached, or something inside raised another error.
        NotStoredError: There is no such object or bucket.
    """
    bucket = url.place.lstrip("/").partition("/")[0]
    try:
        yield _connect(url.scheme, bucket, url.options, _environment())
    except DdltraceError:
        raise
    except Exception as error:  # noqa: BLE001 - the libraries behind fsspec have errors of their own
        cause = _cause(error)
        kind = NotStoredError if cause in (_NO_BUCKET, _NOT_THERE) else StoreError
        raise kind(f"{url}: {cause}") from None


def _cause(error: Exception) -> str:
    text = str(error)
    for pattern, cause in _CAUSES:
        if re.search(pattern, text):
            return cause
    if isinstance(error, FileNotFoundError):
        return _NOT_THERE
    for name, value in os.environ.items():
        if len(value) >= _LEAST_SECRET and _SECRET_NAME.search(name):
            text = text.replace(value, "***")
    text = _USER.sub("***@", text)
    first = text.strip().partition("\n")[0]
    return f"{type(error).__name__}: {first:.160}"


def _environment() -> tuple[str | None, ...]:
    """The variables that choose an S3 endpoint and region: another value, another connection."""
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)
    region = next((os.environ[name] for name in _REGIONS if os.environ.get(name)), None)
    return endpoint, region


@lru_cache(maxsize=16)
def _connect(
    scheme: str,
    bucket: str,
    options: tuple[tuple[str, str], ...],
    environment: tuple[str | None, ...],
) -> fs.FileSystem:
    given = dict(options)
    if scheme == "s3":
        return _connect_to_s3(bucket, given, *environment)
    if scheme in ("gs", "gcs"):
        return fs.GcsFileSystem(
            anonymous=_is_set(given, "anonymous"),
            scheme=given.get("scheme", "https"),
            endpoint_override=given.get("endpoint_override"),
            project_id=given.get("project_id"),
            retry_time_limit=timedelta(seconds=float(given.get("retry_limit_seconds", _RETRY_S))),
        )
    if scheme in ("hdfs", "viewfs"):
        query = "&".join(f"{name}={value}" for name, value in options)
        return fs.FileSystem.from_uri(f"{scheme}://{bucket}/?{query}")[0]
    return _connect_through_fsspec(scheme)


def _connect_to_s3(
    bucket: str, given: dict[str, str], endpoint: str | None, region: str | None
) -> fs.FileSystem:
    endpoint = given.get("endpoint_override", endpoint)
    scheme = given.get("scheme")
    if endpoint is not None and "://" in endpoint:
        found, _, endpoint = endpoint.rstrip("/").partition("://")
        scheme = scheme or found
    region = given.get("region", region)
    if region is None:
        region = "us-east-1" if endpoint else fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        anonymous=_is_set(given, "anonymous"),
        region=region,
        scheme=scheme or "https",
        endpoint_override=endpoint,
        # Otherwise a file that is read faster than it is sent would be in memory as a whole.
        background_writes=False,
        connect_timeout=_CONNECT_S,
        request_timeout=_REQUEST_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
    )


def _is_set(options: dict[str, str], name: str) -> bool:
    return options.get(name, "").lower() in ("1", "true", "yes")


def _connect_through_fsspec(scheme: str) -> fs.FileSystem:
    """A file system of fsspec, for protocols that pyarrow does not know.

    Raises:
        MissingCapabilityError: fsspec, or the package of this protocol, is missing.
        UsageError: No package is known for this protocol.
    """
    try:
        fsspec: Any = importlib.import_module("fsspec")  # it has no type hints
    except ImportError as error:
        raise MissingCapabilityError(
            f"{scheme}:// needs fsspec: pip install 'ddltrace[fsspec]'"
        ) from error
    try:
        made = fsspec.filesystem(scheme)
    except ImportError as error:
        raise MissingCapabilityError(f"{scheme}:// needs another package: {error}") from error
    except ValueError as error:
        raise UsageError(
            f"{scheme}:// is not a protocol that is known here: use s3, gs, hdfs, file, or one of "
            "fsspec's"
        ) from error
    return fs.PyFileSystem(fs.FSSpecHandler(made))
