"""Finds a vendor's shared library, with one search and one message of failure for every binding."""

import ctypes
import os
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from tritongemm.core.errors import UnavailableError
from tritongemm.system import settings
from tritongemm.system.compiled_files import CompiledFiles


def load(what: str, names: tuple[str, ...], folders: Iterable[Path] = ()) -> ctypes.CDLL:
    """Open the first library that is found of these file names, best first, whose stems up to ``.so`` are the same.

    The folders come before the loader's own path. An UnavailableError says where it was looked for.
    """
    tried: list[str] = []
    for candidate in _candidates(names, folders):
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            # a file that is there but does not open says more than one that is missing
            tried.append(f"{candidate} ({error})" if Path(candidate).is_file() else candidate)
    raise UnavailableError(f"{what}: no library found; looked for {', '.join(tried)}")


def load_kept(path: str, sha256: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """Open a library of this content that was compiled and kept in the cache: the very file that was verified.

    Raises:
        UnavailableError: it does not open, is not owned by a trusted user, or has changed.
        OutputError: another user could replace what is in the cache.
        InputError: TRITONGEMM_CACHE_TRUST names no user.
    """
    handle = CompiledFiles(settings.cache_folder()).open_verified(path, sha256)
    try:
        # The descriptor stays open: the loader knows a library by its name, and must not meet this one's again.
        return ctypes.CDLL(f"/proc/self/fd/{handle}", mode=mode)
    except OSError as error:
        os.close(handle)
        raise UnavailableError(f"{path} does not load: {error}") from None


def mapped(stem: str) -> Path | None:
    """Return the file of a library that this process has loaded, if its name starts with `stem`."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in maps.splitlines():
        if stem not in line:
            continue
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(stem) and path.is_file():
            return path
    return None


def wheel_folders(*locations: str) -> list[Path]:
    """Return the folders of installed packages, given as ``package/sub/folder``, without importing any of them."""
    found = []
    for location in locations:
        package, _, rest = location.partition("/")
        try:
            spec = find_spec(package)
        except (ImportError, ValueError):
            continue
        roots = spec.submodule_search_locations if spec else None
        found += [Path(root) / rest for root in roots or ()]
    return [folder for folder in found if folder.is_dir()]


def rocm_folders(kind: str) -> list[Path]:
    """Return ROCm's folders of a name such as ``lib``: the default version's, first, then others, newest first."""
    return [Path("/opt/rocm", kind), *sorted(Path("/opt").glob(f"rocm-*/{kind}"), reverse=True)]


def _candidates(names: tuple[str, ...], folders: Iterable[Path]) -> Iterator[str]:
    # two copies of one runtime in a process do not see each other's memory: what is loaded already comes first
    loaded = mapped(names[0].partition(".so")[0] + ".so")
    if loaded:
        yield str(loaded)
    for folder in folders:
        for name in names:
            if (folder / name).exists():
                yield str(folder / name)
    yield from names
