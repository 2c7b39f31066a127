"""Chooses where Python looks for modules: never in the current folder.

`python -m` and `python -c` put the current folder before everything else, so that a file there that is called triton.py
would be taken for Triton. Folders that the user names, in PYTHONPATH or by a script's place, are trusted.
"""

import os
import sys

HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the folder of the package


def for_children() -> list[str]:
    """Return the folders where a child process looks for modules: this process's, but for the current one.

    The package's own folder is always among them.
    """
    kept = [entry for entry in sys.path[_added_by_python() :] if entry not in ("", os.curdir)]
    return kept if HOME in kept else [HOME, *kept]


def leave_out_current_folder() -> None:
    """Let this process look for modules where its children do; the first step of a command."""
    sys.path[:] = for_children()


def _added_by_python() -> int:
    """Return the number of entries, 0 or 1, that `python -m` put first: the current folder, which was not asked for."""
    by_name = getattr(sys.modules.get("__main__"), "__spec__", None) is not None
    if not by_name or getattr(sys.flags, "safe_path", False):
        return 0
    try:
        return int(sys.path[:1] == [os.getcwd()])
    except FileNotFoundError:  # the current folder has been deleted, so nothing is imported from it
        return 0
