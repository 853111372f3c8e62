"""Fetch the images and recordings of `https:` URLs, so that renderers need no network.

A download is a task, bounded in time and bytes, which is cancelled with its request.  It does not occupy a renderer's
thread.  `urls.py` decides which hosts and addresses are allowed.

Laws.
1. The environment has no influence: no proxies, cookies or password files.  Nothing is retried.
2. Bytes are counted as they arrive, and nothing is decompressed, so a small response cannot fill the memory.
3. Errors contain no text of a library or of the host, which could reveal the network around the server.
"""

import ssl
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import anyio
import anyio.to_thread

from trouper.actors.rendering.media.files import MAX_FILE_BYTES, RefusedFileError
from trouper.actors.rendering.media.parts import FetchedFile, refused, url_name, url_of
from trouper.actors.rendering.media.urls import (
    Address,
    Target,
    admit,
    checked_addresses,
    is_remote,
    redirected,
)
from trouper.config.media import AUDIO, IMAGE, ITEMS, MediaConfig
from trouper.errors import MediaError, QueueOverflowError, TrouperUnprocessableEntityError

if TYPE_CHECKING:
    import httpx2

# Time limit for one file by modality, including DNS, connecting and redirects.
FETCH_S = {IMAGE: 5.0, AUDIO: 10.0}
MAX_REDIRECTS = 3
# Concurrent downloads of all requests, and of one request.
MAX_DOWNLOADS, MAX_OF_REQUEST = 16, 4
# Limit for the downloads of all open requests in memory: 20 of the largest files, or hundreds of typical ones.
OPEN_BYTES = 512 * 2**20
# Try up to this many addresses of a host, one after another.
MAX_ADDRESSES = 4
REDIRECTS = (301, 302, 303, 307, 308)
# Some hosts refuse clients without a User-Agent.
HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "trouper"}
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class RemotePart(NamedTuple):
    """A part of a message with a URL to fetch."""

    message: int
    part: int
    url: str
    # The field that contains the URL.
    name: str = "image_url"

    @property
    def where(self) -> str:
        return f"messages[{self.message}].content[{self.part}].{self.name}"


class Downloads:
    """Fetch the files of requests.  Must be used only in the engine's event loop.

    Args:
        config: contains the allowed hosts and the maximum number of media items per prompt.
        resolve: returns the addresses of a host.
        trust: the TLS context with trusted certificate authorities; the system's by default.
    """

    def __init__(
        self,
        config: MediaConfig,
        resolve: Resolve | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._sources, self._max_items = config.sources, config.max_items
        self._what, self._seconds = ITEMS[config.modality], FETCH_S[config.modality]
        self._resolve = resolve or resolve_host
        self._trust = trust
        self._limiter = anyio.CapacityLimiter(MAX_DOWNLOADS)
        self._num_bytes = 0
        # Reentrant, because garbage collection may run a finalizer at any point of this thread.
        self._lock = threading.RLock()

    async def fill(self, prompt: Any) -> Any:
        """Download the files of a prompt's URLs.  Returns the prompt with the files in place of the URLs.

        Raises:
            MediaError: a URL is not allowed, or the prompt has too many.
            TrouperUnprocessableEntityError: a host did not send the file.
            QueueOverflowError: the files of open requests take too much memory.
        """
        remote = remote_parts(prompt)
        if not remote:
            return prompt
        if len(remote) > self._max_items:
            what = self._what
            rule = f"the prompt has {len(remote)} {what}; the maximum is {self._max_items} (limit_mm_per_prompt)"
            raise MediaError(f"{what}: {rule}", parameter=remote[-1].where, code="too_many_media")
        # Check all URLs before fetching the first one.
        targets: list[Target] = []
        for part in remote:
            try:
                targets.append(admit(part.url, self._sources))
            except RefusedFileError as error:
                raise refused(part.where, error) from None
        files: dict[RemotePart, FetchedFile] = {}
        errors: list[Exception] = []
        mine = anyio.CapacityLimiter(MAX_OF_REQUEST)

        async def fetch(part: RemotePart, target: Target) -> None:
            try:
                async with mine, self._limiter:
                    files[part] = await self._fetched(part, target)
            except Exception as error:
                errors.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for part, target in zip(remote, targets, strict=True):
                tasks.start_soon(fetch, part, target)
        if errors:
            error = errors[0]
            try:
                raise error
            finally:
                # The traceback refers to this frame, which would keep all bytes alive until a garbage collection.
                files.clear()
                errors.clear()
                del error
        return _filled(prompt, files)

    def _held(self, data: bytes) -> FetchedFile:
        """Wrap a file, and count its bytes until it is garbage-collected."""
        file = FetchedFile(data)
        self._count(len(data))
        weakref.finalize(file, self._count, -len(data)).atexit = False
        return file

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes

    async def _fetched(self, part: RemotePart, target: Target) -> FetchedFile:
        try:
            with anyio.fail_after(self._seconds):
                return await self._follow(target)
        except RefusedFileError as error:
            raise refused(part.where, error) from None
        except TimeoutError:
            rule = f"the host did not send the file within {self._seconds:g} s"
        except UnavailableError as error:
            rule = str(error)
        text = f"{part.where}: {rule}; send the file itself as a data: URL"
        raise TrouperUnprocessableEntityError(text, parameter=part.where) from None

    async def _follow(self, target: Target) -> FetchedFile:
        """Fetch a file, and follow redirects on the same host."""
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(target)
            if isinstance(found, FetchedFile):
                return found
            target = redirected(target, found, self._sources)
        raise UnavailableError(f"the host redirects more than {MAX_REDIRECTS} times")

    async def _get(self, target: Target) -> FetchedFile | str:
        """Return the file, or the target of a redirect."""
        import httpx2

        try:
            texts = await self._resolve(target.host, target.port)
        except OSError:
            texts = ()
        addresses = checked_addresses(texts, self._sources)
        if not addresses:
            raise UnavailableError("the host is unknown")
        for address in addresses[:MAX_ADDRESSES]:
            try:
                return await self._get_from(address, target)
            except httpx2.ConnectError:
                continue
            except (httpx2.TransportError, httpx2.InvalidURL):
                raise UnavailableError("the connection to the host failed") from None
        raise UnavailableError("the host cannot be reached, or has no valid certificate")

    async def _get_from(self, address: Address, target: Target) -> FetchedFile | str:
        """Send the request to one checked address.  The host's name is used in the Host header, for SNI and for the certificate."""
        import httpx2

        trust = self._trust
        if trust is None:
            trust = self._trust = await anyio.to_thread.run_sync(ssl.create_default_context)
        shown = f"[{address}]" if address.version == 6 else str(address)
        url = f"{target.scheme}://{shown}:{target.port}{target.path}"
        own_port = "" if url.startswith("https:") and target.port == 443 else f":{target.port}"
        headers = {**HEADERS, "Host": f"{target.host}{own_port}", "Connection": "close"}
        transport = httpx2.AsyncHTTPTransport(verify=trust, trust_env=False)
        # Without a timeout here, because `_fetched` limits the time of the whole download.
        async with httpx2.AsyncClient(transport=transport, trust_env=False, timeout=None) as client:
            name = {"sni_hostname": target.host}
            async with client.stream("GET", url, headers=headers, extensions=name) as answer:
                return await self._read(answer)

    async def _read(self, answer: "httpx2.Response") -> FetchedFile | str:
        """Read a file of at most MAX_FILE_BYTES, or the target of a redirect."""
        if answer.status_code in REDIRECTS and (location := answer.headers.get("location")):
            return location
        if answer.status_code != 200:
            raise UnavailableError(f"the host answered with status {answer.status_code}")
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            raise UnavailableError(
                "the host sent a compressed file, which the request did not accept"
            )
        length = answer.headers.get("content-length", "0")
        pieces = bytearray()
        if not length.isdecimal() or int(length[:20]) > MAX_FILE_BYTES:
            raise _too_long()
        try:
            # Cancelling closes the library's nested generators at once.  A `break` would leave them to the garbage collector.
            with anyio.CancelScope() as reading:
                async for piece in answer.aiter_raw():
                    pieces += piece
                    self._count(len(piece))
                    if len(pieces) > MAX_FILE_BYTES or self._num_bytes > OPEN_BYTES:
                        reading.cancel()
            if len(pieces) > MAX_FILE_BYTES:
                raise _too_long()
            if reading.cancel_called:
                raise QueueOverflowError(
                    f"downloads of open requests take the maximum of {OPEN_BYTES} bytes; try again later"
                )
            return self._held(bytes(pieces))
        finally:
            self._count(-len(pieces))


class UnavailableError(Exception):
    """A host did not send a file.  The client sees the message."""


def _too_long() -> UnavailableError:
    return UnavailableError(f"the file is longer than the {MAX_FILE_BYTES} bytes allowed")


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Return all addresses of a host.  Raises OSError if it has none."""
    import socket

    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


def remote_parts(prompt: Any) -> list[RemotePart]:
    """List the parts of a conversation whose URL names a host."""
    messages: Any = (
        cast("Mapping[str, Any]", prompt).get("messages") if isinstance(prompt, Mapping) else None
    )
    found: list[RemotePart] = []
    for i, content in enumerate(map(_content, _list(messages))):
        for j, part in enumerate(content):
            url = url_of(part)
            if is_remote(url):
                found.append(RemotePart(i, j, cast("str", url), url_name(part) or ""))
    return found


def _filled(prompt: Mapping[str, Any], files: Mapping[RemotePart, FetchedFile]) -> dict[str, Any]:
    """Return a copy of the prompt with files in place of URLs.  The caller's messages are not modified."""
    messages = [*prompt["messages"]]
    for (i, j, _, name), file in files.items():
        content = [*messages[i]["content"]]
        given = content[j].get(name)
        content[j] = {
            **content[j],
            name: {**given, "url": file} if isinstance(given, Mapping) else file,
        }
        messages[i] = {**messages[i], "content": content}
    return {**prompt, "messages": messages}


def _content(message: Any) -> Sequence[Any]:
    return (
        _list(cast("Mapping[str, Any]", message).get("content"))
        if isinstance(message, Mapping)
        else ()
    )


def _list(given: Any) -> Sequence[Any]:
    return cast("Sequence[Any]", given) if isinstance(given, list | tuple) else ()
