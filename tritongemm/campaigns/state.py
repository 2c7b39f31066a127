"""Stores of which log a folder is the campaign, and which of its stages are done."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tritongemm.core.errors import InputError, NewerFileError
from tritongemm.core.values import FINITE, TEXT, FieldKind, list_of, require
from tritongemm.system import files
from tritongemm.system.locks import locked
from tritongemm.system.reading import read_bytes

NAME = "campaign.json"
_SCHEMA = 1
_ADVICE = "choose another folder with -o"
_KINDS = {
    "schema": FieldKind(str(_SCHEMA), lambda value: value == _SCHEMA),
    "log": TEXT,
    "digest": TEXT,
    "target": TEXT,
    "threshold": FINITE,
    "done": list_of(TEXT),
}


@dataclass(frozen=True)
class CampaignState:
    """What a folder is the campaign of.

    Attributes:
        log: name of the log.
        digest: SHA-256 of its contents.
        target: name of the target.
        threshold: of the configs, in percent.
        done: stages that are done, in their order.
    """

    log: str
    digest: str
    target: str
    threshold: float
    done: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> CampaignState | None:
        """Return a folder's state; None where it has no campaign.

        Raises:
            InputError: its file is damaged, or a newer version wrote it.
        """
        path = folder / NAME
        if not path.exists():
            return None
        try:
            values = json.loads(read_bytes(path))
            if isinstance(values, dict) and isinstance(schema := values.get("schema"), int) and schema > _SCHEMA:
                raise NewerFileError(path, schema, _SCHEMA)
            if not isinstance(values, dict) or values.keys() != _KINDS.keys():
                raise InputError(f"it must be a map of {', '.join(_KINDS)}")
            require(values, _KINDS)
        except NewerFileError:
            raise
        except (ValueError, RecursionError, InputError) as error:
            raise InputError(
                f"{path} is damaged ({error}): delete it, and the same command goes through all stages again; what was "
                "measured is kept"
            ) from None
        del values["schema"]
        return cls(**values | {"done": tuple(values["done"])})

    def write(self, folder: Path) -> None:
        """Replace a folder's file.

        Raises:
            OutputError: it can't be written.
        """
        text = json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=1)
        files.atomic_write(folder / NAME, text + "\n", _ADVICE)

    def without(self, stages: Sequence[str]) -> CampaignState:
        """Return the state with some stages not done."""
        return replace(self, done=tuple(stage for stage in self.done if stage not in stages))


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Lock a folder, which is created where it is missing, against other campaigns.

    Raises:
        OutputError: another campaign runs there, or it can't be written.
    """
    path = folder / ".campaign.lock"
    files.check_place(path, lambda start: not start, "a lock of tritongemm", _ADVICE)
    with locked(path, f"another campaign runs in {folder}; wait for it, or {_ADVICE}", _ADVICE):
        files.sweep(folder)
        yield
