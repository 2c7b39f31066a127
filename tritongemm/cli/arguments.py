"""Parses the values of options, numbers in a range, paths and lists, with a parser whose complaints are short."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tritongemm.report.plain_table import keep_words, terminal_width
from tritongemm.system.printable import printable
from tritongemm.system.version import VERSION

LARGEST_SIZE = 2**31 - 1  # kernels count rows and columns in 32 bits
YEAR_S = 365 * 24 * 3600
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz", ".zst", ".7z", ".rar")
_FILES = (*_ARCHIVES, ".yaml", ".yml", ".json", ".jsonl", ".csv", ".txt", ".html", ".py")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_PROCESSES_PER_CORE = 4
_PROCESSES = 16  # what few cores may ask for too
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")  # int() takes 1_6 and digits of other scripts as well
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")  # no nan, no inf


# What each subcommand does.
COMMANDS = {
    "tune": "Tune GEMMs: C[M, N] = A[M, K] @ B[K, N], beside the library; the same command resumes a stopped run.",
    "capture": "Run a program and record the sizes of the GEMMs that it asks PyTorch for.",
    "optimize": "Tune the GEMMs that take most of a job's time, from its BLAS log, and keep those that got faster.",
    "lookup": "Print which row of tuned files serves x [M, K] @ w [N, K].T, or x @ b; no GPU is needed.",
    "convert": "Write results in another format, or merge files of one format.",
    "check": "Report which tuned results are still valid for this toolchain, these libraries and this GPU.",
    "compare-server": "Start a server without and with a table in turn, and compare its times, throughput and tokens.",
    "report": "Draw results as one HTML page.",
    "library": "Pack tuned kernels as a library, which tritongemm.load serves without a compiler; merge and list them.",
    "export": "Write tuned kernels as code objects with a manifest.",
    "launch-plan": "Write a config's code object and launch parameters as files, without a GPU.",
    "gradlib": "Tune with the flags of gradlib's and AITER's tuners.",
    "completion": "Print the script that completes these commands and their options in a shell.",
}


def started_as() -> str:
    """Return how this process was started, for a command line that the user can copy."""
    return "tritongemm" if os.path.basename(sys.argv[0]) == "tritongemm" else "python -m tritongemm"


class Parser(argparse.ArgumentParser):
    """A parser whose complaints take one line, shorten values, and suggest what may be meant.

    Long options may be written with ``_`` or ``-``.
    """

    def __init__(self, prog: str, **given: Any) -> None:
        given.setdefault("description", COMMANDS.get(prog.removeprefix("tritongemm ")))
        super().__init__(prog, **given)
        self._words: list[str] = []
        self.add_argument("--version", action="version", version=f"tritongemm {VERSION}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words; an unknown option is an error of this parser, not of the one above it."""
        self._words = [self._registered(word) for word in (sys.argv[1:] if args is None else args)]
        found, unknown = super().parse_known_args(self._words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the complaint, and exit with status 2."""
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            meant = _closest(choice[1], re.findall(r"[\w-]+", choice[2]))
        else:
            meant = self._closest_option() if message.startswith(("unrecognized", "the following")) else ""
        if choice and message.startswith("argument COMMAND"):
            message = f"there is no command {choice[1]}"
        said = printable(f"{message}; did you mean {meant}?" if meant else message)
        lists = "the commands" if self.prog == "tritongemm" else "all options"
        line = keep_words(f"error: {said} ({self.prog} --help lists {lists})", terminal_width(sys.stderr))
        self.exit(2, f"{line}\n")

    def _registered(self, word: str) -> str:
        """Return a word spelled as this parser's option, or the start of one, with its ``_`` and ``-``."""
        name, equals, value = word.partition("=")
        if not name.startswith("-") or name in self._option_string_actions:
            return word
        dashed = name.replace("_", "-")
        alike = [o for o in self._option_string_actions if o.replace("_", "-").startswith(dashed)]
        return min(alike, key=len)[: len(name)] + equals + value if alike else word

    def _closest_option(self) -> str:
        """Return the option that is spelled like the first unknown one; "" if none is."""
        known = list(self._option_string_actions)
        names = [word.partition("=")[0] for word in self._words if word.startswith("--")]
        unknown = [name for name in names if not any(option.startswith(name) for option in known)]
        bare = {option.lstrip("-"): option for option in known}
        meant = bare.get(_closest(unknown[0].lstrip("-"), list(bare)), "") if unknown else ""
        return f"{meant} by {unknown[0]}" if meant else ""


def _closest(word: str, known: Sequence[str]) -> str:
    import difflib

    return next(iter(difflib.get_close_matches(word, known, 1)), "")


def add_verbose(p: argparse.ArgumentParser) -> None:
    """Add the option that lists messages about rows instead of one line for each kind."""
    p.add_argument("--verbose", action="store_true", help="list every row that is left out, not one of each kind")


def add_shipped(p: argparse.ArgumentParser) -> None:
    """Add the option that reads the shipped tables too; "" for those of this machine's GPU."""
    help_text = "also the shipped tables, of this machine's kind of GPU or of one named, as h200"
    p.add_argument("--shipped", nargs="?", const="", metavar="GPU", help=help_text)


def add_gpus(g: argparse._ActionsContainer, *names: str, default: str = "all") -> None:
    """Add the option that names GPUs."""
    g.add_argument("--gpus", *names, type=devices, metavar="I,J,…",
                   help=f"ordinals of the GPUs to use (default: {default})")  # fmt: skip


def add_devices(g: argparse._ActionsContainer, *names: str, default: str) -> None:
    """Add the options that choose GPUs of this host or of a cluster; `names` are other names of --gpus."""
    add_gpus(g, *names, default="0" if default == "1" else default)
    g.add_argument("--ngpus", type=integer(0, 1024), default=0, metavar="N",
        help=f"use the first N GPUs (default {default}); with --ray, N of the cluster (default all)")  # fmt: skip
    g.add_argument("--ray", type=path, metavar="ADDRESS",
        help="use the GPUs and cores of all hosts of a Ray cluster: auto, or HOST:PORT of its head")  # fmt: skip


def complain_of_devices(args: argparse.Namespace) -> str:
    """Return why the values of `add_devices` contradict each other; "" if they do not."""
    if args.gpus is None:
        return ""
    if args.ngpus:
        return "--gpus and --ngpus exclude each other: the first names GPUs, the second gives their number"
    on_cluster = "--gpus names GPUs of this machine: with --ray, --ngpus says how many of the cluster's are used"
    return "" if args.ray is None else on_cluster


def add_compiling(g: argparse._ActionsContainer, limited: str = "one compile") -> None:
    """Add the options of the compiler processes, and of the time limit of compiles and device work."""
    g.add_argument("--num-threads", type=processes, default=0, metavar="N",
                   help="number of compiler processes (default: one per core)")  # fmt: skip
    g.add_argument("--timeout", type=seconds, default=60.0, metavar="S",
                   help=f"time limit of {limited} in seconds (default %(default)g)")  # fmt: skip


class Once(argparse.Action):
    """An option that is refused when it is given twice, as the first would not count."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value."""
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "is given twice; name one")
        setattr(namespace, self.dest, values)


def integer(least: int, most: int) -> Callable[[str], int]:
    """Return the type of an option that is a whole number of a range, both ends of which it may have."""

    def read(text: str) -> int:
        if _INTEGER.fullmatch(text) and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")

    return read


def number(least: float, most: float, above: bool = False, below: bool = False) -> Callable[[str], float]:
    """Return the type of an option that is a number of a range, without its lower end (`above`) or upper (`below`)."""

    def read(text: str) -> float:
        if _NUMBER.fullmatch(text):
            value = float(text)
            if least <= value <= most and not (above and value == least) and not (below and value == most):
                return value
        least_text = f"more than {least:.15g}" if above else f"at least {least:.15g}"
        most_text = f"less than {most:.15g}" if below else f"at most {most:.15g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number that is {least_text} and {most_text}")

    return read


size = integer(1, LARGEST_SIZE)
seconds = number(0, YEAR_S, above=True)


def m_range(text: str) -> tuple[int, int]:
    """Return the least and the largest M of ``LOW-HIGH``."""
    low, dash, high = text.partition("-")
    if not dash or not low or not high or size(low) > size(high):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of M such as 1-8192")
    return size(low), size(high)


def spread(text: str) -> str | tuple[int, ...]:
    """Return how rows are spread over groups: ``uniform``, ``skewed``, or the rows of each with commas between."""
    if text in ("uniform", "skewed"):
        return text
    try:
        return tuple(integer(0, LARGEST_SIZE)(word) for word in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither uniform nor skewed, nor the rows of each group with commas between, such as 7,0,33"
        ) from None


def processes(text: str) -> int:
    """Return how many processes may compile; 0 for one a core."""
    return integer(0, max(_PROCESSES, _PROCESSES_PER_CORE * len(os.sched_getaffinity(0))))(text)


def budget(text: str) -> tuple[int, float]:
    """Return a number of configs, or of seconds where it ends in ``s``; 0 for the other, and for no limit."""
    try:
        return (0, number(0, YEAR_S)(text[:-1])) if text.endswith("s") else (integer(0, LARGEST_SIZE)(text), 0.0)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of configs, up to {LARGEST_SIZE}, nor, as 90s, of seconds, up to {YEAR_S}s"
        ) from None


def devices(text: str) -> str:
    """Return the numbers of devices with commas between."""
    if re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of GPUs with commas between, such as 0,1")


def path(text: str) -> str:
    """Return a file or folder; ``~`` is the user's home, which a shell does not put in behind ``=``."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    if _CONTROL.search(text):
        raise argparse.ArgumentTypeError(f"{text!r} has control characters; choose another name")
    return os.path.expanduser(text)


def output(text: str) -> str:
    """Return a `path` that is text in full, as compilers take no other."""
    try:
        os.path.abspath(text).encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is in, or is, a name that is no text in this locale; choose another, or set LC_ALL=C.UTF-8"
        ) from None
    return path(text)


def output_file(text: str) -> str:
    """Return an `output` that can be the name of a file, and the beginning of the names beside it."""
    name = output(text)
    if not Path(name).name:
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file in it")
    return name


def output_folder(text: str) -> str:
    """Return an `output` that can be the name of a folder."""
    name = Path(output(text))
    if name.suffix.lower() in _FILES and not name.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} would be a folder; name one that does not end in {name.suffix}")
    return str(name)
