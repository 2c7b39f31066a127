"""What options of every command may say: numbers in a range, paths, lists; and a parser whose complaints are short."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tritongemm.system.printable import printable

LARGEST_SIZE = 2**31 - 1  # kernels count rows and columns in 32 bits
YEAR_S = 365 * 24 * 3600
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz", ".zst", ".7z", ".rar")
_FILES = (*_ARCHIVES, ".yaml", ".yml", ".json", ".jsonl", ".csv", ".txt", ".html", ".py")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_PROCESSES_PER_CORE = 4
_PROCESSES = 16  # what few cores may ask for too
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")  # int() takes 1_6 and digits of other scripts as well
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")  # no nan, no inf


class Parser(argparse.ArgumentParser):
    """A parser whose complaints take one line, and repeat no more of a value than can be read."""

    def error(self, message: str) -> NoReturn:
        """Print the complaint, and exit with status 2."""
        self.exit(2, f"error: {printable(message)} (--help lists all options)\n")


def add_verbose(p: argparse.ArgumentParser) -> None:
    """Add the option that lists what is said of rows without it in one line for each kind."""
    p.add_argument("--verbose", action="store_true", help="list every row that is left out, not one of each kind")


def add_compiling(g: argparse._ActionsContainer, limited: str = "one compile") -> None:
    """Add the options of the compiler processes, and of the time limit of what they and devices do."""
    g.add_argument("--num-threads", type=processes, default=0, metavar="N",
                   help="number of compiler processes (default: one per core)")  # fmt: skip
    g.add_argument("--timeout", type=seconds, default=60.0, metavar="S",
                   help=f"time limit of {limited} in seconds (default %(default)g)")  # fmt: skip


class Once(argparse.Action):
    """An option that is refused when it is given twice, as the first would count for nothing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Keep the value."""
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "is given twice; name one")
        setattr(namespace, self.dest, values)


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of an option that is a whole number of a range, both ends of which it may have."""

    def read(text: str) -> int:
        if _WHOLE.fullmatch(text) and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")

    return read


def number(least: float, most: float, above: bool = False, below: bool = False) -> Callable[[str], float]:
    """The type of an option that is a number of a range.

    Args:
        least: the lower end of the range.
        most: its upper end.
        above: whether it must be more than the lower end.
        below: whether it must be less than the upper end.
    """

    def read(text: str) -> float:
        if _NUMBER.fullmatch(text):
            value = float(text)
            if least <= value <= most and not (above and value == least) and not (below and value == most):
                return value
        least_text = f"more than {least:.15g}" if above else f"at least {least:.15g}"
        most_text = f"less than {most:.15g}" if below else f"at most {most:.15g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number that is {least_text} and {most_text}")

    return read


size = whole(1, LARGEST_SIZE)
seconds = number(0, YEAR_S, above=True)


def m_range(text: str) -> tuple[int, int]:
    """The least and the largest M of ``LOW-HIGH``.

    Raises:
        argparse.ArgumentTypeError: it is no range.
    """
    low, dash, high = text.partition("-")
    if not dash or not low or not high or size(low) > size(high):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of M such as 1-8192")
    return size(low), size(high)


def spread(text: str) -> str | tuple[int, ...]:
    """How rows are spread over groups: ``uniform``, ``skewed``, or the rows of each with commas between.

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    if text in ("uniform", "skewed"):
        return text
    try:
        return tuple(whole(0, LARGEST_SIZE)(word) for word in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither uniform nor skewed, nor the rows of each group with commas between, such as 7,0,33"
        ) from None


def processes(text: str) -> int:
    """How many processes may compile; 0 for one a core.

    Raises:
        argparse.ArgumentTypeError: more than a machine of so many cores can have any use for.
    """
    return whole(0, max(_PROCESSES, _PROCESSES_PER_CORE * len(os.sched_getaffinity(0))))(text)


def budget(text: str) -> tuple[int, float]:
    """Configs, or seconds where it ends in ``s``; 0 for the one not given, and for no limit.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    try:
        return (0, number(0, YEAR_S)(text[:-1])) if text.endswith("s") else (whole(0, LARGEST_SIZE)(text), 0.0)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of configs, up to {LARGEST_SIZE}, nor, as 90s, of seconds, up to {YEAR_S}s"
        ) from None


def devices(text: str) -> str:
    """Numbers of devices with commas between.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of GPUs with commas between, such as 0,1")


def path(text: str) -> str:
    """A file or folder; ``~`` is the user's home, which a shell does not put in behind ``=``.

    Raises:
        argparse.ArgumentTypeError: it is empty, or would write to a terminal what is no text where it is printed.
    """
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    if _CONTROL.search(text):
        raise argparse.ArgumentTypeError(f"{text!r} has control characters; choose another name")
    return os.path.expanduser(text)


def output(text: str) -> str:
    """A `path` that is text in whole, as compilers take no other.

    Raises:
        argparse.ArgumentTypeError: as of `path`, or it has bytes that are no letters in this locale.
    """
    try:
        os.path.abspath(text).encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} lies in, or is, a name that is no text in this locale; choose another, or set LC_ALL=C.UTF-8"
        ) from None
    return path(text)


def output_file(text: str) -> str:
    """An `output` that can be the name of a file; beside it lie others, of whose names its own is the beginning.

    Raises:
        argparse.ArgumentTypeError: as of `output`, or it is a folder by its name alone.
    """
    name = output(text)
    if not Path(name).name:
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file in it")
    return name


def output_folder(text: str) -> str:
    """An `output` that can be the name of a folder.

    Raises:
        argparse.ArgumentTypeError: as of `output`, or it ends as files and archives do, and no folder is called so.
    """
    name = Path(output(text))
    if name.suffix.lower() in _FILES and not name.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} would be a folder; name one that does not end in {name.suffix}")
    return str(name)
