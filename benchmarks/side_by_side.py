"""One table of everything that computes x[M, K] @ w[N, K].T: PyTorch, its tuners, triton.autotune, and ours.

    python benchmarks/side_by_side.py [--gemm_size_file F] [--competitors a,b,…] [--json OUT] [--plot OUT.png]
    python benchmarks/side_by_side.py --recheck TUNED.yaml

One process and one protocol: operands rotate through more than three times the last-level cache, launches are captured
in graphs, a time is the median of replays, and in every round the competitors come in a new random order. Every output
is verified against float64. Each competitor tunes with empty caches. Our tuner is run first, on all sizes at once.

The JSON is rewritten after each size; with --resume the same command goes on from it.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import competitors
from _common import BENCHMARKS, make_operands
from competitors import BASELINE, NAMES, Setting, _board, _hold, _race
from competitors._tuned import Tuned, recorded, tuned

from tritongemm.core.errors import InputError, TritonGemmError
from tritongemm.core.format_row import Defaults
from tritongemm.core.problem import Problem, matrices
from tritongemm.hip_ext import machine
from tritongemm.hip_ext.machine import Machine
from tritongemm.system import settings
from tritongemm.system.files import atomic_write
from tritongemm.workloads import sizes

SIZES = BENCHMARKS / "sizes_48.yaml"


class DeviceLost(Exception):
    """A competitor's kernel faulted, and this process can't use the GPU any more."""


def problems(path: Path) -> list[Problem]:
    """The sizes of a file, bf16 and a linear layer's weights where it does not say.

    Raises:
        InputError: a size that is no plain linear layer.
    """
    found = [row.problem for row in sizes.from_file(path, Defaults.of("bf16", layout="TN"))]
    for problem in found:
        plain = Problem(problem.m, problem.n, problem.k, *matrices(*[problem.a.dtype] * 3, layout="TN"))
        if problem != plain or problem.a.dtype not in ("bf16", "fp16"):
            raise InputError(f"{path}: {problem.key} is not x[M, K] @ w[N, K].T in bf16 or fp16; only that is compared")
    return found


def measure(problem: Problem, here: Machine, folder: Path, ours: Tuned, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one size.

    Raises:
        DeviceLost: the row, as far as it got, is its argument.
    """
    import torch

    target, index = here.target, here.devices[0]
    roof = target.roofline_seconds(problem.flops, problem.bytes, problem.a.type)
    times: dict[str, dict[str, Any]] = {}
    row = {"m": problem.m, "n": problem.n, "k": problem.k, "key": problem.key, "roofline_us": roof * 1e6}
    row["times"] = times
    stream = torch.cuda.Stream(index)
    entries: dict[str, _race.Entry] = {}
    with torch.cuda.stream(stream), torch.no_grad():
        bench = make_operands(problem, here, stream.cuda_stream)
        row |= {"copies": bench.copies, "cold": bench.cold}
        for name in args.competitors:
            setting = Setting(problem, target, bench, folder, args.autotune_configs, ours, tuple(entries))
            try:
                ready = competitors.load(name).prepare(setting)
                times[name] = {"tuning_s": ready.seconds, "detail": ready.detail}
                if ready.same:
                    times[name] |= {"how": f"same as {ready.same}", "same": ready.same}
                else:
                    entries[name] = _race.enter(setting, name, ready, args.graph_us * 1e-6)
            except Exception as error:  # a refusal costs that competitor this size
                times[name] = {"reason": _race.reason(error)}
                _alive(row, args.competitors)
        try:
            _race.race(bench, list(entries.values()), args.rounds, seed=0)
        except Exception as error:
            times |= {name: {"reason": f"in the race: {_race.reason(error)}"} for name in entries}
            raise DeviceLost(row) from error
    for name, entry in entries.items():
        times[name] |= {"us": median(entry.samples) * 1e6, "how": entry.how, "launches": entry.launches}
        times[name] |= {"error": entry.error, "tolerance": entry.tolerance, "spread": _spread(entry.samples)}
        entry.release()
    for shown in times.values():
        if "same" in shown:
            original = times[shown["same"]]
            shown |= {k: original[k] for k in ("us", "spread", "error", "tolerance", "reason") if k in original}
    return row


def _spread(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles, relative to the median."""
    ordered, quarter = sorted(samples), len(samples) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / 2 / median(samples)


def _alive(row: dict[str, Any], names: Sequence[str]) -> None:
    """Raise `DeviceLost` if the last failure took the GPU with it."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception as error:
        for name in names:
            if "us" not in row["times"].get(name, {}) and "reason" not in row["times"].get(name, {}):
                row["times"][name] = {"reason": f"the device was lost to another competitor: {_race.reason(error)}"}
        raise DeviceLost(row) from error


def _free() -> None:
    """Give back the memory of a size."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def compare(args: argparse.Namespace) -> int:
    """Measure what is not in the JSON yet, then print the summary."""
    here = machine.find_machine(None)
    wanted = problems(Path(args.gemm_size_file))
    protocol = {k: getattr(args, k) for k in ("graph_us", "rounds", "autotune_configs", "strategy")}
    document: dict[str, Any] = {"device": here.product, "toolchain": machine.toolchain(here), "protocol": protocol}
    document["rows"] = []
    out = Path(args.json) if args.json else None
    if args.resume and out and out.is_file():
        old = json.loads(out.read_text())
        for key in ("device", "toolchain", "protocol"):
            if old.get(key) != document[key]:
                raise InputError(f"{out} is of {key} {old.get(key)}, this is {document[key]}: name another --json")
        keys = {p.key for p in wanted}
        document["rows"] = [r for r in old["rows"] if r["key"] in keys and set(args.competitors) <= r["times"].keys()]
    done = {r["key"] for r in document["rows"]}
    todo = [p for p in wanted if p.key not in done]
    if todo and not here.devices:
        print("needs a GPU", file=sys.stderr)
        return 2
    names = args.competitors
    versions = ", ".join(f"{package} {settings.version(package)}" for package in ("torch", "triton"))
    print(f"{here.product} ({here.target.name}), {versions}")
    for name in names:
        limit = f", its first {args.autotune_configs} configs as predicted" if name == "autotune" else ""
        print(f"  {name:<12} {competitors.load(name).NOTE}{limit}")
    print("of each: us, times as fast as torch, share of the roofline", flush=True)
    with tempfile.TemporaryDirectory(prefix="side_by_side-") as scratch:
        folder = Path(scratch)
        # Inductor and Triton ask for these when they are first used: every competitor starts with empty caches.
        os.environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        ours = Tuned()
        if todo and {"ours", "ours_triton"} & set(names):
            output = Path(args.tuned).resolve() if args.tuned else folder / "tuned.yaml"
            ours = tuned(todo, here.target, output, folder, args.strategy or "", here.devices[0])
            spent, new = sum(ours.seconds.values()), len(ours.seconds)
            print(f"ours: {new} of {len(todo)} sizes tuned in {spent:.1f} s {ours.failure}".rstrip(), flush=True)
        print(_board.heading(names), flush=True)
        for problem in todo:
            try:
                document["rows"].append(measure(problem, here, folder, ours, args))
                lost = False
            except DeviceLost as error:
                document["rows"].append(error.args[0])
                lost = True
            print(_board.line(document["rows"][-1], names), flush=True)
            _write(out, document, names)
            if lost:
                print("a kernel faulted; this process can't use the GPU any more: go on with --resume", file=sys.stderr)
                return 3
            _free()
    print(_board.table(document["rows"], names))
    _write(out, document, names)
    if args.plot:
        _board.plot(Path(args.plot), document["rows"], names, f"{here.product}, bf16 x[M, K] @ w[N, K].T, cold weights")
    return 0


def _write(out: Path | None, document: dict[str, Any], names: Sequence[str]) -> None:
    if out:
        document["summary"] = _board.summary(document["rows"], names)
        atomic_write(out, json.dumps(document, indent=1) + "\n")


def recheck(args: argparse.Namespace) -> int:
    """Time recorded winners again; 0 if 95 % of their gains hold."""
    here = machine.find_machine(None)
    if not here.devices:
        print("needs a GPU", file=sys.stderr)
        return 2
    records = recorded(Path(args.recheck), here.target)
    won = _hold.gains(list(records.values()))
    if not records:
        raise InputError(f"{args.recheck} holds no measured result for {here.target.name}")
    print(f"{here.product}: {len(won)} of {len(records)} records beat the library; gain recorded, gain now, difference")
    rows = []
    with tempfile.TemporaryDirectory(prefix="side_by_side-") as scratch:
        for row in _hold.again(won, here, Path(scratch)):
            rows.append(row)
            print(_hold.line(row), flush=True)
    found = _hold.outcome(rows)
    print(
        f"Winners hold: {found['within']:.0%} of {found['gains']} recorded gains stay within 2 %; "
        f"{found['not_lower']:.0%} do not fall by more; median difference {found['median_move']:+.2%}"
    )
    if args.json:
        atomic_write(Path(args.json), json.dumps({"device": here.product, **found, "rows": rows}, indent=1) + "\n")
    return 0 if found["within"] >= 0.95 or not rows else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemm_size_file", "--gemm-size-file", default=str(SIZES), metavar="F",
                        help="sizes in any format the tuner reads (default: the 48 of sizes_48.yaml)")  # fmt: skip
    parser.add_argument("--competitors", default=",".join(NAMES), metavar="A,B,…",
                        help=f"of {', '.join(NAMES)} (default all); torch always runs")  # fmt: skip
    parser.add_argument("--json", metavar="OUT", help="write everything here, after each size")
    parser.add_argument("--resume", action="store_true", help="keep the sizes that --json OUT holds already")
    parser.add_argument("--plot", metavar="OUT.png", help="draw the ratios and the shares of the roofline")
    parser.add_argument("--tuned", metavar="FILE", help="our results file; sizes it lacks are tuned and added")
    parser.add_argument("--strategy", metavar="S", help="search strategy of our tuner (default: its own choice)")
    parser.add_argument("--autotune-configs", type=int, default=100, metavar="N",
                        help="configs triton.autotune is given, the best-predicted first (default 100)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="samples of each competitor (default 50)")
    parser.add_argument("--graph-us", type=int, default=400, metavar="US",
                        help="length of a sample at the roofline (default 400, as the tuner's)")  # fmt: skip
    parser.add_argument("--recheck", metavar="FILE", help="only time the winners of a results file again")
    args = parser.parse_args(argv)
    named = [n for n in args.competitors.split(",") if n]
    if unknown := [n for n in named if n not in NAMES]:
        parser.error(f"--competitors {', '.join(unknown)}: there are {', '.join(NAMES)}")
    args.competitors = [n for n in NAMES if n in {*named, BASELINE}]
    if args.autotune_configs < 1 or args.graph_us < 1 or args.rounds < 5:
        parser.error("--autotune-configs and --graph-us must be at least 1, --rounds at least 5")
    if args.resume and not args.json:
        parser.error("--resume goes on from a file: name it with --json")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed; --json keeps what it would draw")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    args = parse(argv)
    try:
        return recheck(args) if args.recheck else compare(args)
    except TritonGemmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
