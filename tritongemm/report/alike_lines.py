"""Summarises messages about rows: one stands for all that differ only in numbers and names with digits."""

import re
from collections.abc import Iterable, Iterator

MOST_LISTED = 3  # of one kind
_VARYING = re.compile(r"\S*\d\S*")


def summarise(lines: Iterable[str], verbose: bool = False, how: str = " (--verbose lists them)") -> Iterator[str]:
    """Yield the lines in the order of their kinds; of one with more than `MOST_LISTED` the first, and how many more."""
    kinds: dict[str, list[str]] = {}
    for line in lines:
        kinds.setdefault(_VARYING.sub("#", line), []).append(line)
    for alike in kinds.values():
        if verbose or len(alike) <= MOST_LISTED:
            yield from alike
        else:
            yield f"{alike[0]}; {len(alike) - 1} others likewise{how}"
