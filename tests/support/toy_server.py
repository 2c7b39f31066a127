"""A server with the HTTP API of vLLM and SGLang that answers in milliseconds; with a table it is faster, and sends two
tokens at a time.

Usage: python -m tests.support.toy_server --port N [--fault FAULT]
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys

STEP_S = 0.004
FAULTS = (
    "start",
    "silent",
    "answer",
    "refuse",
    "page",
    "no model",
)  # when it fails; silent: it never says that it can answer


class Toy:
    """Answers one connection at a time each; a token is its place, behind a table other ones from the sixth on."""

    def __init__(self, fault: str) -> None:
        self.fault, self.has_table = fault, bool(os.environ["TRITONGEMM_CONFIG"])

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request of a connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0] or 0)
        body = json.loads(await reader.readexactly(length) or b"{}")
        if b" /health " in head:
            self._send(writer, 503 if self.fault == "silent" else 200, b"")
        elif self.fault == ("page" if body else "no model") and not body.get("stream"):
            self._send(writer, 200, b"<html>" if body else b"{}")
        elif b" /v1/models " in head:
            self._send(writer, 200, json.dumps({"data": [{"id": "toy"}]}).encode())
        elif self.fault == "answer":
            print("CUDA error: an illegal memory access", flush=True)
            os._exit(3)
        elif self.fault == "refuse":
            self._send(writer, 400, b'{"error": "the prompt is too long"}')
        elif body.get("stream"):
            await self._stream(writer, body["max_tokens"])
        else:
            self._send(writer, 200, self._tokens(body["max_tokens"]))
        writer.close()

    def _send(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    async def _stream(self, writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for place in range(1, count + 1):
            await asyncio.sleep(STEP_S / 2 if self.has_table else STEP_S)
            if place % (1 + self.has_table) == 0:
                self._send_event(writer, {"choices": [{"text": "t"}], "usage": {"completion_tokens": place}})
        self._send_event(writer, {"choices": [], "usage": {"completion_tokens": count}})
        writer.write(b"0\r\n\r\n")

    def _send_event(self, writer: asyncio.StreamWriter, data: object) -> None:
        event = f"data: {json.dumps(data)}\n\n".encode()
        writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")

    def _tokens(self, count: int) -> bytes:
        tokens = [f"t{place + 100 * (self.has_table and place > 4)}" for place in range(count)]
        logprobs = {"tokens": tokens, "token_logprobs": [-0.1 - 0.01 * self.has_table] * count}
        return json.dumps({"choices": [{"logprobs": logprobs}]}).encode()


async def serve(port: int, fault: str) -> None:
    """Serve until the process is ended; a child of another session runs beside it."""
    toy = Toy(fault)
    server = await asyncio.start_server(toy.answer, "127.0.0.1", port)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(f"processes {os.getpid()} {child.pid}", flush=True)
    if toy.has_table:
        print(f"INFO {os.environ['TRITONGEMM_CONFIG']} (sha256 12): 2 of 3 rows serve cuda:0 (sm90); 1 for gfx942")
        print("INFO tuned kernels serve 4 of 5 linear layers of Toy", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--fault", choices=FAULTS, default="")
    options = parser.parse_args()
    if options.fault == "start":
        sys.exit("no such model")
    asyncio.run(serve(options.port, options.fault))
