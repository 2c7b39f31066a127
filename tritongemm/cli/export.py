"""The command line of `python -m tritongemm.export`: tuned winners as code objects with a manifest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tritongemm.cli import options
from tritongemm.core.errors import TritonGemmError
from tritongemm.export.kernel_manifest import export
from tritongemm.formats import Defaults
from tritongemm.runtime import machine
from tritongemm.workloads import sizes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 2 for bad input."""
    p = argparse.ArgumentParser(prog="python -m tritongemm.export", description="Write tuned kernels as a manifest.")
    p.add_argument("results", metavar="FILE", help="results of python -m tritongemm.tune")
    p.add_argument("-o", "--output", required=True, metavar="DIR", help="folder for kernels.csv and the code objects")
    p.add_argument("--target", metavar="ARCH", help="only results for it; default: this machine's GPU, or gfx942")
    args = p.parse_args(options.normalised(sys.argv[1:] if argv is None else argv))
    try:
        rows = sizes.from_file(Path(args.results), Defaults())
        held = {id(r.record): r for r in rows}
        records = [r.record for r in rows if r.record is not None]
        paths, refused = export(records, Path(args.output), machine.find_machine(args.target))
    except OSError as error:
        print(f"error: -o {args.output} can't be written: {error.strerror}; choose another folder", file=sys.stderr)
        return 2
    except TritonGemmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for record, reason in refused:
        print(f"left out: {held[id(record)].where(args.results)}: {record.problem.key}: {reason}", file=sys.stderr)
    print("export TRITONGEMM_ASM_MANIFESTS=" + ":".join(str(p.resolve()) for p in paths))
    return 0
