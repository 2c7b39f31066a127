"""Writes untuned files of AITER's families with the sizes of models, and times the tuning of each file.

    python benchmarks/aiter_files.py FOLDER [--families NAME,…] [--models NAME,…] [--write] [--json OUT] [-- OPTIONS]

Sizes are those of linear layers of DeepSeek-V3 and of Llama-70B on one of eight GPUs, 27 to 64 rows a file, in the
columns that AITER's tuners read. Each file is tuned by a command of its own, in its own folder, so that no file gains
by another's results; compiled kernels are kept in a cache of the folder's unless TRITONGEMM_CACHE names another.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from _common import command_environment

_Rows = list[tuple[object, ...]]
_LADDER = (1, 16, 32, 64, 128, 256, 1024, 4096)
_FINE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# (N, K) of each layer.
LAYERS = {
    "deepseek_v3": ((2112, 7168), (3072, 1536), (4096, 512), (7168, 2048), (4608, 7168), (7168, 2304), (4096, 7168),
                    (7168, 16384)),
    "llama_70b": ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)),
}  # fmt: skip
# (B, N, K): DeepSeek-V3's absorbed products of 16 of 128 heads; Llama's, in AITER's own file, of 16 requests.
BATCHED = {"deepseek_v3": ((16, 512, 128), (16, 128, 512)), "llama_70b": ((16, 1280, 8192), (16, 8192, 1024))}
_EXPERTS = {"deepseek_v3": (7168, 256, 256, 8)}  # hidden and inner width, experts, and those of a token
_FP8 = "torch.float8_e4m3fn"
_SIZES = ("M", "N", "K")
COLUMNS: dict[str, tuple[str, ...]] = {
    "bf16": (*_SIZES, "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle"),
    "a8w8": (*_SIZES, "q_dtype_w"),
    "a8w8_bpreshuffle": (*_SIZES, "q_dtype_w"),
    "a8w8_blockscale": _SIZES,
    "a8w8_blockscale_bpreshuffle": _SIZES,
    "a4w4_blockscale": _SIZES,
    "batched_a8w8": ("B", *_SIZES),
    "batched_bf16": ("B", *_SIZES),
    "fmoe": (
        *("token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a", "q_dtype_w", "q_type"),
        *("use_g1u1", "doweight_stage1"),
    ),
}
_KINDS = {
    "bf16": (False, "torch.bfloat16", "torch.bfloat16", False, False),
    "a8w8": ("torch.int8",),
    "a8w8_bpreshuffle": ("torch.int8",),
}


@dataclass(frozen=True)
class TunedFile:
    """What came of a file.

    Attributes:
        model, family: whose sizes, and of what.
        rows: sizes in the file.
        written: rows in the tuned file.
        results: results in our own file beside it.
        seconds: of the command.
        status: its exit status.
        last: the last line that it said.
    """

    model: str
    family: str
    rows: int
    written: int
    results: int
    seconds: float
    status: int
    last: str


def list_rows(model: str, family: str, fp8: str = "") -> _Rows:
    """The rows of a model's untuned file.

    Args:
        model: a key of `LAYERS`.
        family: a key of `COLUMNS`.
        fp8: PyTorch's name of a type for files that name one; "" for int8, as AITER's own files have.
    """
    if family == "fmoe":
        return _list_layers(model, fp8 or _FP8)
    if "B" in COLUMNS[family]:
        return [(batch, m, n, k) for (batch, n, k), m in product(BATCHED[model], _FINE)]
    ladder = _LADDER if len(LAYERS[model]) * len(_FINE) > 64 else _FINE
    kind = (fp8,) if fp8 and family.startswith("a8w8") and family in _KINDS else _KINDS.get(family, ())
    return [(m, n, k, *kind) for (n, k), m in product(LAYERS[model], ladder)]


def _list_layers(model: str, fp8: str) -> _Rows:
    """The rows of a model's layers with experts, in bf16 and in fp8 of blocks; none where it has none."""
    kinds = (("torch.bfloat16", "QuantType.No"), (fp8, "QuantType.per_1x128"))
    return [
        (token, *_EXPERTS[model], "ActivationType.Silu", "torch.bfloat16", dtype, dtype, kind, 1, 0)
        for (dtype, kind), token in product(kinds, _FINE)
        if model in _EXPERTS
    ]


def file_name(family: str, word: str) -> str:
    """What AITER calls a family's file of ``tuned`` or ``untuned`` sizes."""
    if family == "fmoe":
        return f"{word}_fmoe.csv"
    if family.startswith("batched_"):
        return f"{family.removeprefix('batched_')}_{word}_batched_gemm.csv"
    return f"{family}_{word}_gemm.csv"


def write_file(folder: Path, model: str, family: str, fp8: str = "") -> Path:
    """Write a model's untuned file into a folder of the model's and the family's."""
    place = folder / f"{model}_{family}"
    place.mkdir(parents=True, exist_ok=True)
    path = place / file_name(family, "untuned")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS[family])
        writer.writerows(list_rows(model, family, fp8))
    return path


def tune_file(path: Path, model: str, family: str, more: list[str]) -> TunedFile:
    """Tune a file as a user does."""
    tuned = path.with_name(file_name(family, "tuned"))
    cache = os.environ.get("TRITONGEMM_CACHE") or str(path.parent / "cache")
    environment = command_environment(TRITONGEMM_CACHE=cache)
    words = ["--gemm_size_file", str(path), "-o", str(tuned), *more]
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tritongemm.tune", *words], env=environment, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - started
    said = (done.stderr + done.stdout).strip().splitlines()
    path.with_name("output.txt").write_text("\n".join(said) + "\n", encoding="utf-8")
    own = tuned.with_suffix(".yaml")
    return TunedFile(
        model, family, _count_lines(path) - 1, max(0, _count_lines(tuned) - 1), _count_results(own), round(seconds, 1),
        done.returncode, said[-1] if said else "",
    )  # fmt: skip


def _count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def _count_results(path: Path) -> int:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return sum(line.startswith("- {") for line in text.splitlines())


def main() -> int:
    """Write the files, tune them one after the other, and print a table; 1 where one could not be tuned."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path)
    p.add_argument("--families", default=",".join(COLUMNS), help="AITER's names, with commas between (all)")
    p.add_argument("--models", default=",".join(LAYERS), help="with commas between (all)")
    p.add_argument("--fp8", default="", metavar="TYPE", help="q_dtype_w, such as torch.float8_e4m3fn (torch.int8)")
    p.add_argument("--write", action="store_true", help="only write the files")
    p.add_argument("--json", type=Path, metavar="OUT", help="write what came of each file")
    p.add_argument("tune", nargs="*", metavar="-- TUNE OPTIONS", help="options of tritongemm tune, behind --")
    args = p.parse_args()
    found = list[TunedFile]()
    print(f"{'file':42} rows written results seconds status", flush=True)
    for model, family in product(args.models.split(","), args.families.split(",")):
        if not list_rows(model, family, args.fp8):
            continue
        path = write_file(args.folder, model, family, args.fp8)
        if args.write:
            print(f"{model + ' ' + family:42} {_count_lines(path) - 1:4}")
            continue
        one = tune_file(path, model, family, args.tune)
        found.append(one)
        line = f"{one.rows:4} {one.written:4} {one.results:7} {one.seconds:7.1f} {one.status:6}"
        print(f"{model + ' ' + family:42} {line}" + (f"  {one.last}" if one.status else ""), flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")
    return int(any(one.status for one in found))


if __name__ == "__main__":
    sys.exit(main())
