"""The options of commands that take sizes from a model's config.json."""

import argparse
import re
from pathlib import Path

from tritongemm.cli import arguments
from tritongemm.tune.request import ModelSource
from tritongemm.workloads.model_sizes import DEFAULT_TOKENS

_MOST_VALUES = 10_000  # of M


def add_model_options(g: argparse._ArgumentGroup) -> None:
    """Add the options that name a model and its deployment."""
    g.add_argument("--model-dir", type=arguments.path, metavar="DIR",
        help="tune the linear layers of the model whose config.json is in DIR, as one of --tp GPUs runs them; or of a "
        "downloaded model by its name at Hugging Face, as meta-llama/Llama-3.1-8B")  # fmt: skip
    g.add_argument("--tp", type=arguments.integer(1, 1024), metavar="N", help="GPUs that share each layer (default 1)")
    g.add_argument("--nsets", type=numbers, nargs="+", metavar="M",
        help=f"numbers of tokens, used as M (default {','.join(map(str, DEFAULT_TOKENS))})")  # fmt: skip
    g.add_argument("--all-bias", action="store_true", help="tune each size with and without a bias")


def numbers(text: str) -> tuple[int, ...]:
    """Return comma-separated sizes."""
    words = re.split(r",\s*", text)
    if len(words) > _MOST_VALUES:
        raise argparse.ArgumentTypeError(f"these are {len(words)} numbers; name at most {_MOST_VALUES}")
    return tuple(map(arguments.size, words))


def complain_of_model(args: argparse.Namespace) -> str:
    """Return why the options contradict --model_dir; "" if they do not."""
    given = [
        name
        for name, is_given in (
            ("--tp", args.tp is not None),
            ("--nsets", args.nsets is not None),
            ("--all_bias", args.all_bias),
        )
        if is_given
    ]
    if args.model_dir is None:
        return f"{given[0]} is for the sizes of a model: name its folder with --model_dir" if given else ""
    files = (args.gemm_size_file, args.workload)
    others = files != (None, None) or (args.m, args.n, args.k) != (None, None, None)
    if others:
        return "--model_dir and -m, -n, -k or a file of sizes exclude each other; name values of M with --nsets"
    if args.col_a or args.bias_vector:
        return "a model defines the layouts and biases of its layers: omit -col_a and --bias_vector"
    return ""


def read_model(args: argparse.Namespace, factor: int = 1) -> ModelSource | None:
    """Return the model that is named, with `factor` times the numbers of tokens; None for none."""
    if args.model_dir is None:
        return None
    tokens = DEFAULT_TOKENS if args.nsets is None else [m for group in args.nsets for m in group]
    unique = tuple(dict.fromkeys(m * factor for m in tokens))
    return ModelSource(Path(args.model_dir), args.tp or 1, unique, args.all_bias)
