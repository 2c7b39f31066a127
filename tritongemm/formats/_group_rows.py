"""Converts the keys of a YAML row about batches and groups to and from the fields of a problem."""

from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.core.group_rows import GROUP_FORMS, SPREADS, Groups, check_shares, counts_of_shares
from tritongemm.formats._yaml_rows import Entry

GROUP_KEYS = ("group_form", "group_spread", "group_counts", "group_room")
SHARE_KEYS = ("group_shares", "group_samples")  # of sizes, as a capture writes them


def read_several(entry: Entry, m: int) -> dict[str, Any]:
    """Return how many products a row is of, and what they share; only what it says, by the names of a `Problem`."""
    said: dict[str, Any] = {"batch": entry.integer("batch", 1, 1)} if "batch" in entry.values else {}
    if "shared" in entry.values:
        said["shared"] = entry.text("shared", choices=("a", "b"))
    groups = entry.integer("groups", 1, 1)
    return said | {"groups": groups} | _read_groups(entry) | _read_shares(entry, m, groups)


def _read_groups(entry: Entry) -> dict[str, Any]:
    """Return how a row shares its rows out to groups; only what it says."""
    said: dict[str, Any] = {}
    if "group_form" in entry.values:
        said["group_form"] = entry.text("group_form", choices=GROUP_FORMS)
    if "group_spread" in entry.values:
        said["spread"] = entry.text("group_spread", choices=SPREADS)
    if "group_counts" in entry.values:
        said["counts"] = entry.whole_numbers("group_counts")
    if "group_room" in entry.values:
        said["room"] = entry.integer("group_room", 1, 0)
    if said and "groups" not in entry.values:
        entry.fail(f"has {next(k for k in GROUP_KEYS if k in entry.values)} but no groups; name both or neither")
    return said


def _read_shares(entry: Entry, m: int, groups: int) -> dict[str, Any]:
    """Return the rows of each group of a size, by the groups' captured shares; nothing without."""
    entry.integer("group_samples", 1, 1)
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


def groups_row(groups: Groups | None) -> dict[str, Any]:
    """Return how a problem's rows are shared out to groups, as far as it differs from a row's defaults."""
    if groups is None:
        return {}
    found: dict[str, Any] = {"group_spread": groups.spread} if groups.spread == "skewed" else {}
    found |= {"group_counts": list(groups.counts)} if groups.counts else {}
    return found | ({"group_form": "masked", "group_room": groups.room} if groups.room else {})
