"""The contracts of file formats."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tritongemm.core.config import Config
from tritongemm.core.format_row import Defaults, FormatRow, Merged, ResultsFile, Translation
from tritongemm.core.record import Record
from tritongemm.core.space import SearchLimits
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.plugin import Plugin


class Format(Plugin, abstract=True):
    """A file format of sizes or results."""

    package = "tritongemm.formats"
    kind = "format"
    title: ClassVar[str]  # a description of a few words, for messages
    suffixes: ClassVar[tuple[str, ...]] = ()  # endings of its file names

    @abstractmethod
    def recognises(self, path: Path, text: str) -> bool:
        """Say whether a file is in this format, by its name or contents."""

    @abstractmethod
    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """Return the rows of a file's text, the damaged ones apart; raise an InputError if it can't be read at all."""

    def read(self, path: Path, text: str, defaults: Defaults) -> list[FormatRow]:
        """Return the rows of a file as `read_usable` does; an InputError names the place of a damaged one."""
        return list(self.read_usable(path, text, defaults).require_undamaged().rows)


class WritableFormat(Format, abstract=True):
    """A format that results can be written in, completely or in part."""

    @abstractmethod
    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """Convert records to this format, merged with the existing contents of its files.

        Several records of one problem on one device are the best and the kernels that may replace it if the format
        can't express it, the best first. `before` has the text of each existing file by its name, "" being the output
        itself; its rows for other problems or devices are kept byte for byte. A file in another format raises an
        InputError.
        """

    def translate_rows(
        self, rows: Sequence[FormatRow], records: Iterable[Record], before: Mapping[str, str]
    ) -> Translation:
        """Convert records to this format as `translate` does, given the rows that requested them."""
        return self.translate(records, before)

    def merge(self, sources: Sequence[tuple[Path, str]], family: str = "") -> Merged | None:
        """Merge files of this format, with rows that can't be interpreted here; None if the format has no such rows.

        Of rows for the same problem the fastest is kept, on ties the first. `family` is that of files that do not name
        it. Files that can't be read, or do not belong together, raise an InputError.
        """
        return None


class TunerFormat(WritableFormat, abstract=True):
    """The tables of another tuner, each of one family, which that tuner's users also edit."""

    families: ClassVar[tuple[str, ...]]  # the tables' names for families, which a user may give instead of ours
    # Whether a call without a row of its own M is served by the row of AITER's padded M.
    padded_m: ClassVar[bool] = False

    @abstractmethod
    def why_unrecognised(self, path: Path, text: str) -> str:
        """Say what to change in a file that no format recognises but that seems meant for this one; "" otherwise."""

    @abstractmethod
    def why_not_in(self, path: Path, text: str, family: str, record: Record) -> str:
        """Say why a file, by its name and contents ("" of a new one), can't hold a result; "" if it can.

        `family` is the user's statement of what files compute.
        """

    @abstractmethod
    def arrange(self, text: str) -> str:
        """Return the text of a file with its rows in the tuner's order."""


class ServerFormat(WritableFormat, abstract=True):
    """Tables that configure a server's own kernels, which can be raced within the values that they accept.

    Results are written to several files of a folder, whose names say what they hold.
    """

    server: ClassVar[str]  # its name
    # The kind of problem (`Problem.kind`) that its kernels are for. For `grouped`, a row is one config for both
    # products of a layer of experts.
    computes: ClassVar[str] = "one"

    @property
    def backend(self) -> str:
        """Name of the backend that launches the server's own kernels, if there is one."""
        return self.server.lower()

    @abstractmethod
    def list_sizes(
        self, n: int, k: int, defaults: Defaults, chosen: int = 1, tokens: Sequence[int] = ()
    ) -> list[FormatRow]:
        """List the sizes that the server looks up for a weight with N result columns and depth K.

        For experts these are the inner size of one and the hidden size, and `chosen` is the number of experts per
        token. `tokens` is every M to list; if empty, those of the server's own tables. A family and dtype without such
        a table raises an InputError.
        """

    @abstractmethod
    def limits(self, family: str, target: Target) -> SearchLimits:
        """Return what the server's kernel accepts, and its current configs; an InputError without such a table."""

    @abstractmethod
    def can_express(self, config: Config) -> bool:
        """Say whether `translate` may write a generated kernel of this config, for a result that another kernel won."""


class ResultsFormat(WritableFormat, abstract=True):
    """The format of our own results."""

    @abstractmethod
    def write(self, records: Iterable[Record]) -> str:
        """Return the text of a file with these records; `read` returns equal records."""

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """Convert records to a file of their own."""
        results = list(records)
        return Translation({"": self.write(results)}, len(results))

    @abstractmethod
    def read_results(self, path: Path, text: str, defaults: Defaults | None = None) -> ResultsFile:
        """Return the rows of a file, without remarks on them.

        A damaged row raises an InputError, which names file, row, line and field.
        """

    @abstractmethod
    def write_sizes(self, rows: Iterable[FormatRow]) -> str:
        """Return the text of a file of sizes with their call counts; `read` returns equal problems.

        A problem that a row can't express raises an InputError.
        """
