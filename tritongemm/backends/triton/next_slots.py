"""Finds where the next slot's blocks are while products of this one run, in a kernel's PTX.

A loop over K begins with matrix instructions, whose descriptors are made of the number of a slot. Where a sum was just
scaled, nothing else of the group of warps runs while they are made, some six instructions that wait for each other.
Such instructions go before the loop, for its first slot, and to where it knows the number of the next one.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

_LABEL = re.compile(r"(\$L\w+):")
_PRODUCT = "wgmma.mma_async"
_WRITTEN = re.compile(r"\s*(?:@!?%p\d+\s+)?[\w.:]+\s+(\{[^}]*\}|%r\d+)")  # what an instruction writes
_MADE = re.compile(r"\s*(?:add|sub|shl|shr|mul|mad|mov|bfe|and|or|xor|selp)\.\S+\s+(?P<into>%r\d+),\s*(?P<of>[^;]*);$")
_ADDRESS = re.compile(r"\s*bfe\.u32\s+(%r\d+), %r\d+, 4, \d+;$")  # of a block, as descriptors have it
_MOVE = re.compile(r"\s*mov\.[bu]32\s+(?P<into>%r\d+), (?P<of>%r\d+);$")
_REGISTER = re.compile(r"%r\d+\b")


def find_ahead(assembly: str) -> str:
    """Return a kernel's PTX whose loops find addresses of blocks ahead; loops of another form are as they were."""
    lines, uses = assembly.split("\n"), Counter(_REGISTER.findall(assembly))
    for first, last in reversed(list(_loops(lines))):
        lines[first : last + 1] = _changed(lines[first : last + 1], uses)
    return "\n".join(lines)


def _loops(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last line of each loop that is entered from above, without branches, with products."""
    labels = [(i, found[1]) for i, line in enumerate(lines) if (found := _LABEL.match(line))]
    uses = [found for line in lines for found in re.findall(r"\$L\w+", line)]
    for (first, name), (after, _) in zip(labels, [*labels[1:], (len(lines), "")], strict=True):
        last = next((i for i in range(first, after) if re.match(rf"\s*@!?%p\d+ bra\s+{re.escape(name)};", lines[i])), 0)
        if last and uses.count(name) == 2 and any(_PRODUCT in line for line in lines[first:last]):
            yield first, last


def _changed(body: list[str], uses: Mapping[str, int]) -> list[str]:
    """Return a loop with what finds its blocks before it and behind the number of its next slot, if it can be.

    `uses` says how often the kernel names each register.
    """
    made = {i: found for i, line in enumerate(body) if (found := _MADE.match(line))}
    written = [
        (i, name)
        for i, line in enumerate(body)
        if (found := _WRITTEN.match(line))
        for name in _REGISTER.findall(found[1])
    ]
    product = next(i for i, line in enumerate(body) if _PRODUCT in line)
    addresses = {found[1] for line in body[:product] if (found := _ADDRESS.match(line))}
    wanted, moved, copies = set(addresses), list[int](), dict[str, str]()
    for i in sorted((i for i in made if i < product), reverse=True):
        if made[i]["into"] in wanted:
            wanted |= set(_REGISTER.findall(made[i]["of"]))
            if _MOVE.match(body[i]):  # of the slot, whose number is wanted later too: it stays
                copies[made[i]["into"]] = made[i]["of"]
            else:
                moved.insert(0, i)
    # All that they are made of in the loop is the slot, which becomes the next one once.
    changes = [i for i, name in written if i not in moved and name in wanted - copies.keys()]
    if not addresses or len(changes) != 1 or changes[0] not in made:
        return body
    slot, following = made[changes[0]]["into"], made[changes[0]]["of"]
    moves = _MOVE.match(body[changes[0]])
    known = [i for i, name in written if name == following] if moves else changes
    own = {made[i]["into"] for i in moved}
    used = [i for i, line in enumerate(body) if i not in moved and not own.isdisjoint(_REGISTER.findall(line))]
    named = Counter(_REGISTER.findall("\n".join(body)))
    outside = any(uses[name] != named[name] for name in own)
    if outside or len(known) != 1 or known[0] < product or max(used, default=0) > known[0]:
        return body
    first = [body[i] for i in moved]
    for name, source in copies.items():
        first = [re.sub(rf"{re.escape(name)}\b", source, line) for line in first]
    again = [re.sub(rf"{re.escape(slot)}\b", following if moves else slot, line) for line in first]
    rest = [line if i not in moved else "" for i, line in enumerate(body)]
    return [*first, *rest[: known[0] + 1], *again, *rest[known[0] + 1 :]]
