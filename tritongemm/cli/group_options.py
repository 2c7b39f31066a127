"""The options of a grouped GEMM, as in a mixture of experts."""

import argparse

from tritongemm.cli import arguments
from tritongemm.core.group_rows import GROUP_FORMS, MOST_GROUPS, SPREADS, Groups


def add_group_options(g: argparse._ArgumentGroup) -> None:
    """Add the options of a grouped GEMM, as in a mixture of experts."""
    g.add_argument("--groups", type=arguments.integer(1, MOST_GROUPS), default=1, metavar="G",
        help="grouped GEMM of G groups, each with its own B (mixture of experts); -m is the total rows "
        "(default 1)")  # fmt: skip
    g.add_argument("--group-form", choices=GROUP_FORMS, default=GROUP_FORMS[0],
        help="contiguous: the rows of the groups follow each other; masked: room for --room rows per group (default "
        "%(default)s)")  # fmt: skip
    g.add_argument("--spread", type=arguments.spread, default=SPREADS[0], metavar="HOW",
        help="how rows are spread over groups in tuning: uniform, skewed (few groups have most rows), or "
        "comma-separated captured rows per group, such as 7,0,33 (default %(default)s)")  # fmt: skip
    g.add_argument("--room", type=arguments.size, default=0, metavar="ROWS",
        help="rows that each group has room for in the masked form, which needs it")  # fmt: skip


def read_groups(args: argparse.Namespace) -> Groups | None:
    """Return the groups that the options describe; None of one product."""
    if args.groups == 1:
        return None
    given = {"spread": args.spread} if isinstance(args.spread, str) else {"spread": "captured", "counts": args.spread}
    return Groups.from_json({"groups": args.groups, "group_form": args.group_form, "room": args.room, **given})
