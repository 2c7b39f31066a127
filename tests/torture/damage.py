import random
from collections.abc import Callable

_WORST = 400  # bytes that one damage takes, at the most


def _flip_a_bit(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _change_a_byte(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _change_a_digit(data: bytes, rng: random.Random) -> bytes:
    """Damage that leaves the form of the file as it is."""
    places = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
    if not places:
        return _change_a_byte(data, rng)
    at = rng.choice(places)
    return data[:at] + rng.choice("0123456789-.e").encode() + data[at + 1 :]


def _cut_out(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randrange(1, _WORST) :]


def _blank_out(data: bytes, rng: random.Random) -> bytes:
    """Zeros, as a file system leaves them that lost a block."""
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.randrange(1, _WORST))
    return data[:at] + bytes(end - at) + data[end:]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    end = at + rng.randrange(1, _WORST)
    return data[:end] + data[at:end] + data[end:]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randrange(1, 20)) + data[at:]


def _cut_off(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _swap_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def _nest(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice([b"[", b"{", b"- ", b"(", b"{a: "]) * rng.choice([3, 1000, 300_000]) + data[at:]


KINDS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip_a_bit, _change_a_byte, _change_a_digit, _cut_out, _blank_out, _repeat, _insert, _cut_off, _swap_lines, _nest,
)  # fmt: skip


def damaged(data: bytes, rng: random.Random, most: int = 3) -> bytes:
    """The bytes after one to `most` damages."""
    for _ in range(rng.randint(1, most)):
        if data:
            data = rng.choice(KINDS)(data, rng)
    return data
