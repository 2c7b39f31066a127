"""Sends requests to a server of OpenAI's HTTP API, and notes when its tokens come."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, suppress
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from tritongemm.core.errors import UnavailableError
from tritongemm.system.printable import printable

_CONNECT_SECONDS = 5.0
_LONGEST_LINE = 1 << 22  # bytes
_MOST_OF_COMPLAINT = 500  # characters
_TOGETHER_S = 1e-4  # what comes sooner after another was read with it
_COUNTED = {"include_usage": True, "continuous_usage_stats": True}  # each event says how many tokens there are
_Answer = TypeVar("_Answer")


class Arrivals(NamedTuple):
    """When the tokens of one answer came."""

    first_s: float  # seconds from the request to the first token
    gaps_s: list[float]  # seconds of each token behind the first event's; tokens of one event share the time before it


class Continuation(NamedTuple):
    """Greedy tokens that continue a prompt, and the logarithms of their probabilities."""

    tokens: list[str]
    logprobs: list[float]


class Client:
    """A client of one server, whose answers may take `limit_s` seconds; the key is what it requires, or ""."""

    def __init__(self, host: str, port: int, key: str = "", limit_s: float = 300.0) -> None:
        self.host, self.port, self.limit_s, self.model = host, port, limit_s, ""
        self._key = f"Authorization: Bearer {key}\r\n" if key else ""

    @property
    def address(self) -> str:
        """The server's address, as a browser takes it."""
        return f"http://{self.host}:{self.port}"

    async def connects(self) -> bool:
        """Return whether any program accepts connections there."""
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(self.host, self.port), _CONNECT_SECONDS)
        except (OSError, asyncio.TimeoutError):
            return False
        writer.close()
        return True

    async def is_healthy(self) -> bool:
        """Return whether the server says that it can answer."""
        try:
            await asyncio.wait_for(self._read("GET", "/health"), _CONNECT_SECONDS)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError, UnavailableError):
            return False
        return True

    async def find_model(self) -> str:
        """Return the name of the model that the server serves, which later requests name."""
        self.model = await self._limited(self._first_model())
        return self.model

    async def _first_model(self) -> str:
        return str(json.loads(await self._read("GET", "/v1/models"))["data"][0]["id"])

    async def stream(self, prompt: Sequence[int], answer: int) -> Arrivals:
        """Return when the tokens of an answer to a prompt of token ids came, `answer` of them."""
        return await self._limited(self._stream(prompt, answer))

    async def _stream(self, prompt: Sequence[int], answer: int) -> Arrivals:
        begin, events = time.perf_counter(), list[tuple[float, int]]()
        body = self._body(prompt, answer, stream=True, stream_options=_COUNTED)
        async with aclosing(self._lines("POST", "/v1/completions", body)) as lines:
            async for line in lines:
                if line.startswith(b"data: {"):
                    now, count = time.perf_counter(), _tokens(line, events[-1][1] if events else 0)
                    if events and now - events[-1][0] < _TOGETHER_S:
                        now = events.pop()[0]
                    if not events or count > events[-1][1]:
                        events.append((now, count))
        if not events or not events[-1][1]:
            raise UnavailableError("the server answered without a token")
        gaps = [((after - before) / (n - m), n - m) for (before, m), (after, n) in pairwise(events)]
        return Arrivals(events[0][0] - begin, [gap for gap, tokens in gaps for _ in range(tokens)])

    async def greedy(self, prompt: Sequence[int], answer: int) -> Continuation:
        """Return the most probable tokens behind a prompt."""
        return await self._limited(self._greedy(self._body(prompt, answer, logprobs=1)))

    async def _greedy(self, body: bytes) -> Continuation:
        choice = json.loads(await self._read("POST", "/v1/completions", body))["choices"][0]
        found = choice.get("logprobs") or {}
        return Continuation(
            list(found.get("tokens") or ()), [value or 0.0 for value in found.get("token_logprobs") or ()]
        )

    def _body(self, prompt: Sequence[int], answer: int, **others: Any) -> bytes:
        """Return the request for a number of greedy tokens, neither more nor fewer."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
        return json.dumps({**asked, **others}).encode()

    async def _limited(self, answer: Awaitable[_Answer]) -> _Answer:
        """Return an answer that comes in time; an UnavailableError if it does not, or is no answer of this API."""
        try:
            return await asyncio.wait_for(answer, self.limit_s)
        except asyncio.TimeoutError:
            raise UnavailableError(f"the server did not answer a request within {self.limit_s:g} s") from None
        except (OSError, EOFError) as error:
            raise UnavailableError(f"the connection to the server broke: {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UnavailableError(f"the server's answer is not one of OpenAI's HTTP API: {error!r}") from None

    async def _read(self, method: str, path: str, body: bytes = b"") -> bytes:
        async with aclosing(self._lines(method, path, body)) as lines:
            return b"\n".join([line async for line in lines])

    async def _lines(self, method: str, path: str, body: bytes = b"") -> AsyncGenerator[bytes, None]:
        """Yield the lines of an answer as they come. Raises UnavailableError: the server refuses the request."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=_LONGEST_LINE)
        try:
            writer.write(
                f"{method} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nConnection: close\r\n{self._key}"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            status = int((await reader.readline()).split()[1])
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            blocks = _chunks(reader) if b"transfer-encoding: chunked" in headers else _blocks(reader)
            rest, complaint = b"", b""
            async for block in blocks:
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    if status == 200:
                        yield line
                    complaint += line
            if status != 200:
                raise UnavailableError(f"the server answered {path} with status {status}: {_words(complaint + rest)}")
            yield rest
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the chunks of a body in HTTP's chunked coding."""
    while size := int((await reader.readline()).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _blocks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield a body that ends with the connection."""
    while block := await reader.read(1 << 16):
        yield block


def _tokens(line: bytes, before: int) -> int:
    """Return the tokens of an answer up to an event: one more than before where the server does not count them.

    A server that is slower in sending tokens than in making them puts several into one event.
    """
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event or event.get("object") == "error":
        raise UnavailableError(f"the server answered {_words(line)}")
    if not event["choices"]:  # usage alone, behind the last token
        return before
    usage = event.get("usage") or {}
    return int(usage.get("completion_tokens", before + 1))


def _words(text: bytes) -> str:
    return printable(text.decode(errors="replace"), _MOST_OF_COMPLAINT)
