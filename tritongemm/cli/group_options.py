"""The options that make of a GEMM products of groups of rows, as a mixture of experts has them."""

from __future__ import annotations

import argparse
from typing import Any

from tritongemm.cli import arguments
from tritongemm.core.group_rows import GROUP_FORMS, MOST_GROUPS, SPREADS


def add_group_options(g: argparse._ArgumentGroup) -> None:
    """Add the options that make of the GEMM products of groups of rows, as a mixture of experts has them."""
    g.add_argument(
        "--groups",
        type=arguments.whole(1, MOST_GROUPS),
        default=1,
        metavar="G",
        help="products of G groups of rows with a B each (a mixture of experts); -m is the rows of all (default 1)",
    )
    g.add_argument(
        "--group-form",
        choices=GROUP_FORMS,
        default=GROUP_FORMS[0],
        help="contiguous: the rows of each group behind those of the last; masked: room for --room rows each (default "
        "%(default)s)",
    )
    g.add_argument(
        "--spread",
        type=arguments.spread,
        default=SPREADS[0],
        metavar="HOW",
        help="rows of each group while it is tuned: uniform, skewed (few groups have most of them), or captured ones "
        "with commas between, such as 7,0,33 (default %(default)s)",
    )
    g.add_argument(
        "--room",
        type=arguments.size,
        default=0,
        metavar="ROWS",
        help="rows that each group of the masked form has room for",
    )


def read_groups(args: argparse.Namespace) -> dict[str, Any]:
    """What the options were given, by the names of `Defaults`."""
    given = args.spread
    spread, counts = (given, ()) if isinstance(given, str) else ("captured", given)
    return {
        "groups": args.groups,
        "group_form": args.group_form,
        "spread": spread,
        "counts": counts,
        "room": args.room,
    }
