"""Finds files in object stores and on servers, through fsspec, and copies them part by part.

A store may be slow, cut an answer short, refuse for a while, or not yet have what it lists: each
request is repeated with growing pauses before it counts as failed. Credentials and endpoints are
those of fsspec's own packages (s3fs, gcsfs, aiohttp): their variables and files.
"""

import functools
import glob
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from spmdtrain.config.errors import DataError

PACKAGES = {"https": "aiohttp", "http": "aiohttp", "s3": "s3fs", "gs": "gcsfs"}
PART_BYTES = 2**23  # copied by one request
TRIES = 6
FIRST_PAUSE = 0.5  # seconds; each one is twice as long
SILENT_SECONDS = 60  # after which a server that sends nothing counts as gone
FORBIDDEN = {400, 401, 403}  # asking again does not help
# The stores' names for the stamp that changes with an object's content, the best first.
STAMPS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "Digest"),
    *("generation", "LastModified", "Last-Modified", "updated", "mtime"),
)
Answer = TypeVar("Answer")


class RemoteFile(NamedTuple):
    """A file of a store as its listing describes it."""

    address: str
    size: int  # bytes
    stamp: str  # changes with its content


def is_remote(path: str) -> bool:
    """Returns True if a path is an address of a store or a server."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme in PACKAGES


def find_remote(pattern: str) -> list[RemoteFile]:
    """Returns the files that an address names, which may be a glob; sorted by name.

    Raises DataError if there are none, or if the store does not answer.
    """
    scheme = pattern.partition("://")[0]
    files = _file_system(scheme)
    addresses = [pattern]
    if glob.has_magic(pattern.partition("?")[0] if scheme.startswith("http") else pattern):
        names = _with_retries(lambda: files.glob(pattern), pattern)
        addresses = sorted(files.unstrip_protocol(name) for name in names)
    if not addresses:
        raise DataError(f"no file matches {pattern}")
    return [describe(address) for address in addresses]


def describe(address: str) -> RemoteFile:
    """Returns a file's size and stamp. Raises DataError if the store does not give them."""
    files = _file_system(address.partition("://")[0])

    def ask() -> dict[str, Any]:
        files.invalidate_cache()
        return files.info(address)

    listing = _with_retries(ask, address)
    if listing.get("type") == "directory":
        raise DataError(f"{address} is a folder", fix=f"{address.rstrip('/')}/*.jsonl")
    size = listing.get("size")
    if not isinstance(size, int):
        raise DataError(f"{address} does not say its size", fix="a copy of it on this machine")
    stamp = next((str(listing[name]) for name in STAMPS if listing.get(name)), "")
    return RemoteFile(address, size, stamp)


def parts_of(address: str, size: int) -> Iterator[bytes]:
    """Yields the `size` bytes of a file, in order. Raises DataError if they cannot be read."""
    files = _file_system(address.partition("://")[0])
    for start in range(0, size, PART_BYTES):
        stop = min(start + PART_BYTES, size)

        def ask(start: int = start, stop: int = stop) -> bytes:
            content = files.cat_file(address, start=start, end=stop)
            if len(content) == size:  # a server that knows no ranges sends the whole file
                content = content[start:stop]
            if len(content) != stop - start:
                raise EOFError(f"{len(content)} of {stop - start} bytes came")
            return content

        yield _with_retries(ask, address)


@functools.cache
def _file_system(scheme: str) -> Any:
    """Returns fsspec's file system. Raises DataError if a package of the extra is missing."""
    try:
        import fsspec

        options = {}
        if scheme.startswith("http"):
            import aiohttp

            silent = aiohttp.ClientTimeout(total=None, sock_read=SILENT_SECONDS, sock_connect=30)
            options = {"client_kwargs": {"timeout": silent}}
        return fsspec.filesystem(
            scheme, use_listings_cache=False, skip_instance_cache=True, **options
        )
    except ImportError:
        raise DataError(
            f"{scheme}:// needs the packages `fsspec` and `{PACKAGES[scheme]}`",
            fix="pip install 'spmdtrain[remote]'",
        ) from None


def _with_retries(ask: Callable[[], Answer], address: str) -> Answer:
    """Returns the result of `ask`, repeated after failures. Raises DataError after the last one."""
    for number in range(TRIES):
        try:
            return ask()
        except Exception as error:  # each package has its own errors
            if _is_final(error) or number == TRIES - 1:
                raise DataError(
                    f"cannot read {address}: {_reason(error)}",
                    fix="the address and its credentials",
                ) from None
        time.sleep(FIRST_PAUSE * 2**number)
    raise AssertionError("the last try returns or raises")


def _is_final(error: Exception) -> bool:
    return isinstance(error, PermissionError) or _status(error) in FORBIDDEN


def _status(error: Exception) -> int | None:
    """Returns the status code of a server's answer, which fsspec may wrap as a missing file."""
    return getattr(error, "status", None) or getattr(error.__cause__, "status", None)


def _reason(error: Exception) -> str:
    status = _status(error)
    cause = error.__cause__
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError) and not status:
        return str(cause)  # no server answers, which fsspec calls a missing file too
    if isinstance(error, FileNotFoundError) and status in (None, 404):
        return "there is no such file"
    return f"the server answers {status}" if status else str(error) or type(error).__name__
