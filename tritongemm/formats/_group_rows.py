"""What the keys of a YAML row mean that say how many products it is of, and how groups share its rows."""

from __future__ import annotations

from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.core.group_rows import GROUP_FORMS, SPREADS, check_shares, counts_of_shares
from tritongemm.core.problem import Problem
from tritongemm.formats._yaml_rows import Entry

GROUP_KEYS = ("group_form", "group_spread", "group_counts", "group_room")
SHARE_KEYS = ("group_shares", "group_samples")  # of sizes, as a capture writes them


def read_several(entry: Entry, m: int) -> dict[str, Any]:
    """How many products a row is of, and what they share; only what it says, by the names of a `Problem`.

    Args:
        entry: the row.
        m: its M.

    Raises:
        InputError: it is wrong; names file, row, line and field.
    """
    said: dict[str, Any] = {"batch": entry.whole("batch", 1, 1)} if "batch" in entry.values else {}
    if "shared" in entry.values:
        said["shared"] = entry.text("shared", choices=("a", "b"))
    groups = entry.whole("groups", 1, 1)
    return said | {"groups": groups} | _read_groups(entry) | _read_shares(entry, m, groups)


def _read_groups(entry: Entry) -> dict[str, Any]:
    """How a row shares its rows out to groups; only what it says."""
    said: dict[str, Any] = {}
    if "group_form" in entry.values:
        said["group_form"] = entry.text("group_form", choices=GROUP_FORMS)
    if "group_spread" in entry.values:
        said["spread"] = entry.text("group_spread", choices=SPREADS)
    if "group_counts" in entry.values:
        said["counts"] = entry.whole_numbers("group_counts")
    if "group_room" in entry.values:
        said["room"] = entry.whole("group_room", 1, 0)
    if said and "groups" not in entry.values:
        entry.fail(f"has {next(k for k in GROUP_KEYS if k in entry.values)} but no groups; name both or neither")
    return said


def _read_shares(entry: Entry, m: int, groups: int) -> dict[str, Any]:
    """The rows of each group of a size, by the shares that groups had when they were captured; nothing without."""
    entry.whole("group_samples", 1, 1)
    if "group_shares" not in entry.values:
        return {}
    if groups == 1 or "group_counts" in entry.values:
        entry.fail("has group_shares, which is for a row with several groups and without group_counts")
    shares = entry.numbers("group_shares")
    try:
        check_shares(groups, shares)
    except InputError as error:
        entry.fail(f"group_shares can't be: {error}")
    return {"counts": counts_of_shares(m, shares)}


def groups_row(problem: Problem) -> dict[str, Any]:
    """How a problem's rows are shared out to groups, as far as a row that says nothing would be read otherwise."""
    found: dict[str, Any] = {"group_spread": problem.spread} if problem.spread == "skewed" else {}
    found |= {"group_counts": list(problem.counts)} if problem.counts else {}
    return found | ({"group_form": problem.group_form, "group_room": problem.room} if problem.room else {})
