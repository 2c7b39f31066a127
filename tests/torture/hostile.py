import random

_TEXTS = (
    "", " ", "~", "null", "true", "nan", "-inf", ".inf", "0", "-1", "1_6", "0x10", "010", "1e999", "16.0", "٣", "²",
    "99999999999", "9223372036854775808", "2147483648", "9" * 5000, "A" * 100_000, "é…🔑", "a:key:b",
    "[/x]", "[bold red]", "{{ 7 * 7 }}", "{% include '/etc/passwd' %}", "__import__('os').system('id')",
    "'; import os; os.abort() #",
    '"""\nimport os\nos.abort()\n"""', "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x00", "\r\n", "\u202e", "\ud800",
    "../../../../etc/passwd", "/dev/zero", "/dev/null", "/proc/self/mem", "..", "/", "*",
    "!!python/object:os.system id", "&a [*a]", "a" * 300 + ".yaml", "-o", "--help", "%s%n", "$(id)", "`id`",
    "<!--", "\ufeff",
)  # fmt: skip

_NUMBERS = (
    0, -1, 1, 2**31 - 1, 2**31, 2**63, 10**30, -(10**30), 0.0, -1.0, 1e308, 1e-320, float("nan"), float("inf"),
    None, True, False,
)  # fmt: skip


def text(rng: random.Random) -> str:
    """A string that some parser, shell, terminal, template or number type may stumble over."""
    if rng.random() < 0.2:
        return "".join(
            chr(rng.choice([rng.randrange(1, 128), rng.randrange(1, 0xD800)])) for _ in range(rng.randrange(9))
        )
    return rng.choice(_TEXTS)


def value(rng: random.Random) -> object:
    """A value as JSON or YAML may hold it: of another kind, out of range, or nested."""
    kind = rng.randrange(6)
    if kind == 0:
        return [value(rng) for _ in range(rng.randrange(3))]
    if kind == 1:
        return {text(rng): value(rng) for _ in range(rng.randrange(3))}
    if kind == 2:
        return text(rng)
    return rng.choice(_NUMBERS)
