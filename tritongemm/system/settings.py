"""Reads the environment, here and nowhere else.

TRITONGEMM_CACHE    folder of compiled kernels; default: ~/.cache/tritongemm
TRITONGEMM_CACHE_TRUST   users whose compiled kernels are used too where a folder is shared, separated by ","; "group"
                    for the folder's group; default: only root, and the owner of a folder that no other user can write
TRITONGEMM_CONFIG   files of tuned records, libraries of kernels, and "shipped" for the tables of this package, that
                    `tritongemm.mm` serves, and the plug-ins of servers, separated by ":"
AITER_CONFIG_GEMM_BF16, AITER_CONFIG_GEMM_A8W8, …   the same of AITER's families, as AITER calls them, behind those
TRITONGEMM_FREE     share of a GPU's memory that stays free where a server's weights of four bits are kept twice;
                    default: 0.5
TRITONGEMM_LOG      config: a line in the log for each new size that is called; AITER_LOG_TUNED_CONFIG=1 is the same
TRITONGEMM_NATIVE   0: calls are served from Python alone
TRITONGEMM_ONLINE   1: algorithms of the vendor's library are tried for sizes that `tritongemm.mm` meets untuned
HIP_ONLINE_TUNING   the same, as AITER calls it
TRITONGEMM_ONLINE_SECONDS   seconds that this may take for a size, then, behind ":", for a process; default: 1:60
TRITONGEMM_CAPTURE  file of sizes that gets the products which a program asks PyTorch for
AITER_TUNE_GEMM     1: bf16_untuned_gemm.csv in the working folder gets them too, as AITER writes it
TRITONGEMM_ASM_MANIFESTS   manifests of assembly kernels that compete, separated by ":"
CK_DIR              Composable Kernel: its sources or an installation; default: ROCm's, or that of the amd-aiter package
CUTLASS_DIR         CUTLASS: its sources; default: those of the nvidia-cutlass package
"""

import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from tritongemm.core.errors import InputError, UnavailableError

_ON = ("1", "true", "yes", "on")
_AITER_CONFIGS = {  # AITER's families by their variables
    "AITER_CONFIG_GEMM_BF16": "bf16",
    "AITER_CONFIG_GEMM_A8W8": "a8w8",
    "AITER_CONFIG_GEMM_A8W8_BPRESHUFFLE": "a8w8_bpreshuffle",
    "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE": "a8w8_blockscale",
    "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE": "a8w8_blockscale_bpreshuffle",
    "AITER_CONFIG_GEMM_A4W4": "a4w4_blockscale",
    "AITER_CONFIG_A8W8_BATCHED_GEMM": "batched_a8w8",
    "AITER_CONFIG_BF16_BATCHED_GEMM": "batched_bf16",
    "AITER_CONFIG_FMOE": "fmoe",
}
_SECONDS = re.compile(r"([0-9]{1,7}(?:\.[0-9]{1,6})?)(?::([0-9]{1,7}(?:\.[0-9]{1,6})?))?")

UNTUNED_NAME = "bf16_untuned_gemm.csv"  # AITER's name of the sizes that it was asked for


def cache_folder() -> Path:
    """Return the folder of compiled kernels."""
    named = os.environ.get("TRITONGEMM_CACHE")  # set but empty means unset, here and below
    if not named:
        return default_cache_folder()
    try:
        folder = Path(named).expanduser()
        with suppress(FileNotFoundError):  # it will be made
            folder.stat()
    except RuntimeError:  # "~name" of a user that is not known
        raise UnavailableError(f"TRITONGEMM_CACHE names {named!r}: there is no such home folder") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UnavailableError(
            f"compiled kernels can't be kept in {folder}: {why}; name another folder in TRITONGEMM_CACHE"
        ) from None
    return folder


def default_cache_folder() -> Path:
    """Return the folder of compiled kernels where none is named."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "tritongemm").expanduser()
    except RuntimeError:  # a container's user without an entry in its password file
        raise UnavailableError(
            "this user has no home folder to keep compiled kernels in: name one in TRITONGEMM_CACHE"
        ) from None


def hub_folder() -> Path:
    """Return the folder of the models that Hugging Face's client has downloaded, by its own variables."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")))


def cache_trust() -> tuple[str, ...]:
    """Return the users whose compiled kernels are used too; ``group`` is the group of the folder."""
    names = os.environ.get("TRITONGEMM_CACHE_TRUST", "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def tuned_configs() -> tuple[Path, ...]:
    """Return the files of tuned records, in the order given."""
    return _paths("TRITONGEMM_CONFIG")


@dataclass(frozen=True)
class AiterConfig:
    """A file of tuned configs that one of AITER's variables names."""

    variable: str  # its name
    family: str  # what AITER calls what the variable's files are of
    path: Path  # of the file


def aiter_configs() -> tuple[AiterConfig, ...]:
    """Return AITER's files of tuned configs, those of a variable in the order given."""
    return tuple(AiterConfig(name, family, path) for name, family in _AITER_CONFIGS.items() for path in _paths(name))


def logs_choices() -> bool:
    """Return whether the log states what serves each new size."""
    asked = os.environ.get("AITER_LOG_TUNED_CONFIG", "").lower() in _ON
    return asked or "config" in os.environ.get("TRITONGEMM_LOG", "").lower().split(",")


def server_invariant() -> bool:
    """Return whether a row of each of vLLM's results must have the same bits at every M."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "").lower() in _ON


def invariant() -> bool:
    """Return whether a row of a result must have the same bits at every M."""
    return server_invariant() or os.environ.get("TRITONGEMM_INVARIANT", "").lower() in _ON


def native() -> bool:
    """Return whether calls may be served from compiled code."""
    return os.environ.get("TRITONGEMM_NATIVE", "") != "0"


def free_share() -> float:
    """Return the share of a GPU's memory that stays free where weights are kept twice."""
    text = os.environ.get("TRITONGEMM_FREE") or "0.5"
    share = float(text) if _SECONDS.fullmatch(text) and ":" not in text else 2.0
    if share > 1:
        raise InputError(f"TRITONGEMM_FREE must be a share of the GPU's memory from 0 to 1, as 0.5, not {text!r}")
    return share


def online() -> bool:
    """Return whether algorithms of the vendor's library are tried at run time."""
    return any(os.environ.get(name, "").lower() in _ON for name in ("TRITONGEMM_ONLINE", "HIP_ONLINE_TUNING"))


def online_seconds() -> tuple[float, float]:
    """Return the seconds that trying algorithms at run time may take: for a size, for a process."""
    text = os.environ.get("TRITONGEMM_ONLINE_SECONDS") or ""
    found = _SECONDS.fullmatch(text)
    if text and not found:
        raise InputError(
            f"TRITONGEMM_ONLINE_SECONDS must be seconds for a size and for a process, as 1:60, not {text!r}"
        )
    size, process = found.groups() if found else (None, None)
    return float(size or 1), float(process or 60)


def capture_files() -> tuple[Path, ...]:
    """Return the files that get the products which this process asks PyTorch for."""
    named = _path("TRITONGEMM_CAPTURE")
    aiter = os.environ.get("AITER_TUNE_GEMM", "").lower() in ("1", "true")
    return (*((named,) if named else ()), *((Path(UNTUNED_NAME),) if aiter else ()))


def capture_in_children(path: Path) -> None:
    """Let child processes capture to a file too."""
    os.environ["TRITONGEMM_CAPTURE"] = str(path)


def is_own_command() -> bool:
    """Return whether this process runs a command of this package, whose own products are not captured."""
    words = sys.orig_argv
    modules = [word.partition(".")[0] for before, word in pairwise(words) if before == "-m"]
    scripts = [os.path.basename(word) for word in words[1:2]]
    return "tritongemm" in (*modules[:1], *scripts)


def for_own_children() -> dict[str, str]:
    """Return the environment of child processes of this project, in which nothing is captured."""
    return {name: value for name, value in os.environ.items() if name not in ("TRITONGEMM_CAPTURE", "AITER_TUNE_GEMM")}


def for_server(table: str) -> dict[str, str]:
    """Return the environment of a server that is to serve a table, and no other; "" for none."""
    kept = {name: value for name, value in for_own_children().items() if name not in _AITER_CONFIGS}
    return {**kept, "TRITONGEMM_CONFIG": table}


def asm_manifests() -> tuple[Path, ...]:
    """Return the manifests of assembly kernels, in the order given."""
    return _paths("TRITONGEMM_ASM_MANIFESTS")


def ck_folder() -> Path | None:
    """Return the folder of Composable Kernel, if one is set."""
    return _path("CK_DIR")


def cutlass_folder() -> Path | None:
    """Return the folder of CUTLASS, if one is set."""
    return _path("CUTLASS_DIR")


def _path(variable: str) -> Path | None:
    """Return the path that a variable names; ``~`` stays where the user's home is unknown."""
    value = os.environ.get(variable, "")
    return Path(os.path.expanduser(value)) if value else None


def _paths(variable: str) -> tuple[Path, ...]:
    """Return the paths that a variable lists, in its order."""
    value = os.environ.get(variable, "")
    return tuple(Path(os.path.expanduser(path)) for path in value.split(os.pathsep) if path)


@cache
def version(package: str) -> str:
    """Return the installed version of a package, without importing it; ``missing`` if there is none."""
    # importing it takes 60 ms, and this module is imported before a command can answer a signal
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"
