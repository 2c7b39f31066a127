"""Makes the tables over M of the models served most on this machine's GPUs, the most served first."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from scripts.tables import gains, packing
from scripts.tables.making import TableMaker
from scripts.tables.products import list_products
from tritongemm.cli import arguments
from tritongemm.hip_ext import machine
from tritongemm.hip_ext.driver import driver

_VERSION = re.compile(r"\b\d{3}\.[\d.]+")


def main() -> int:
    """Make tables; the exit status is 1 where a product failed."""
    p = argparse.ArgumentParser("scripts/make_tables", description=__doc__)
    p.add_argument("-o", "--output", type=Path, default=Path("output/shipped_tables.yaml"), metavar="FILE",
                   help="rows of finished tables; those that it has are not made again (%(default)s)")  # fmt: skip
    p.add_argument("--work", type=Path, metavar="DIR", help="folder of unfinished runs (the output's, with .work)")
    p.add_argument("--budget", type=arguments.budget, default=(0, 0.0), metavar="Ss",
                   help="seconds after which all is written, as 540s (no limit)")  # fmt: skip
    arguments.add_gpus(p)
    p.add_argument("--options", type=shlex.split, default=[], help="further options of tritongemm tune, in one text")
    p.add_argument("--list", action="store_true", help="print the products in their order, and make nothing")
    p.add_argument("--pack", action="store_true", help="write the output's tables into the package, and make none")
    p.add_argument("--gains", action="store_true", help="print what the output's tables gain in each model")
    args = p.parse_args()
    products = list_products()
    if args.pack:
        print(packing.pack(args.output, products))
        return 0
    if args.list:
        for product in products:
            print(f"{product.problem.product}, M up to {product.high}: {'; '.join(product.layers)}")
        return 0
    if args.gains:
        print("\n".join(gains.describe(args.output)))
        return 0
    gpus = args.gpus or ",".join(map(str, range(machine.count_devices())))
    here = machine.find_machine(None, gpus or None)
    work = args.work or args.output.with_suffix(".work")
    maker = TableMaker(products, args.output, work, _head(here), args.budget[1], args.options)
    print(f"{here.why}; {len(maker.products)} of {len(products)} products have no table yet", flush=True)
    maker.run(gpus.split(","), partial(print, flush=True))
    made = {record.problem.at(1) for record in maker.made}
    print(f"{args.output}: {len(maker.made)} rows, tables of {len(made)} of {len(products)} products")
    return 1 if maker.failed else 0


def _head(here: machine.Machine) -> str:
    """Return the first line of the results: when and where they were made."""
    installed = Path("/proc/driver/nvidia/version")
    made = {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "driver": (_VERSION.findall(installed.read_text(encoding="utf-8")) or [""])[0] if installed.exists() else "",
        "driver_api": driver.open_driver(here.vendor).version() if here.vendor else 0,
        "memory_gbps": machine.memory_gbps(here),
    }
    return f"# made: {json.dumps(made)}\n"


raise SystemExit(main())
