"""Loads of a server: how many requests it is sent at once, and how long prompts and answers are."""

import asyncio
import random
import time
from dataclasses import dataclass
from statistics import median

from tritongemm.measure.server.client import Arrivals, Client, Continuation

_TOKENS = (1000, 20000)  # of prompts: neither special tokens of a vocabulary nor beyond the smallest one
_AGREEMENT = ((4, 1), (16, 16))  # prompts, and how many of them at once
_AGREEMENT_PROMPT, AGREEMENT_ANSWER = 128, 64  # tokens


@dataclass(frozen=True)
class Load:
    """Requests of one kind."""

    name: str  # in tables
    in_flight: int  # requests that the server works on at once, its batch
    requests: int  # of a pass
    # prompt, answer: tokens of each
    prompt: int
    answer: int
    m: int  # the M of the products that take most of the time: a batch's while it decodes, or a prompt's


def decoding(batch: int, prompt: int, answer: int) -> Load:
    """Return a load that mostly decodes; every place of the batch is filled at least twice."""
    return Load(f"batch {batch}", batch, max(4, 2 * batch), prompt, answer, batch)


def prefilling(prompt: int) -> Load:
    """Return a load of long prompts with short answers, one after the other."""
    return Load(f"prompt {prompt}", 1, 16, prompt, 4, prompt)


async def send(client: Client, load: Load, seed: int) -> dict[str, float]:
    """Send a load's requests, and return the medians of one pass, by the names of quantities.

    Prompts of other seeds and loads have nothing in common, which a cache would serve.
    """
    waiting = _prompts(load.requests, load.prompt, f"{load.name} {seed}")
    arrived: list[Arrivals] = []

    async def fill_one_place() -> None:
        while waiting:
            arrived.append(await client.stream(waiting.pop(), load.answer))

    begin = time.perf_counter()
    await asyncio.gather(*(fill_one_place() for _ in range(load.in_flight)))
    seconds = time.perf_counter() - begin
    gaps = [gap for one in arrived for gap in one.gaps_s]
    tokens = load.requests * max(load.prompt, load.answer)
    return {
        "step_ms": 1e3 * median(gaps or [0.0]),
        "tpot_ms": 1e3 * median(sum(one.gaps_s) / max(load.answer - 1, 1) for one in arrived),
        "ttft_ms": 1e3 * median(one.first_s for one in arrived),
        "tokens_per_s": tokens / seconds,
    }


async def continue_greedily(client: Client) -> list[Continuation]:
    """Return greedy answers to the same prompts each time, one after the other and many at once."""
    found: list[Continuation] = []
    for count, at_once in _AGREEMENT:
        prompts = _prompts(count, _AGREEMENT_PROMPT, f"agreement {count}")
        for start in range(0, count, at_once):
            asked = [client.greedy(prompt, AGREEMENT_ANSWER) for prompt in prompts[start : start + at_once]]
            found += await asyncio.gather(*asked)
    return found


def _prompts(count: int, length: int, seed: str) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(*_TOKENS) for _ in range(length)] for _ in range(count)]
