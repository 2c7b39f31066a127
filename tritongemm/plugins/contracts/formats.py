"""The contracts of file formats, and of lines in logs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow, Merged, NewerRow, ResultsFile, Translation
from tritongemm.core.logged_call import LogContents
from tritongemm.core.record import SCHEMA, Record
from tritongemm.core.search_limits import SearchLimits
from tritongemm.core.target import Target
from tritongemm.plugins.contracts.plugin import Plugin


class Format(Plugin, abstract=True):
    """A file format of sizes or results.

    Attributes:
        title: what it is, in a few words, for messages.
        suffixes: file names end so.
        can_write: it can tell our results.
        padded_m: AITER looks its rows up at a padded M where a call has no row of its own M.
        families: names that its files have for what they compute, which a user may say in place of ours.
        keeps_folder: results are told in several files of a folder, whose names say what they are of.
    """

    package = "tritongemm.formats"
    kind = "format"
    title: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    can_write: ClassVar[bool] = False
    padded_m: ClassVar[bool] = False
    families: ClassVar[tuple[str, ...]] = ()
    keeps_folder: ClassVar[bool] = False

    @abstractmethod
    def recognises(self, path: Path, text: str) -> bool:
        """Whether a file is in this format, by its name or contents."""

    @abstractmethod
    def read(self, path: Path, text: str, defaults: Defaults) -> list[FormatRow]:
        """The rows of a file, in its order.

        Args:
            path: for messages.
            text: contents.
            defaults: what holds for a row that does not say.

        Raises:
            InputError: a row is wrong; names file, row, line and field.
        """

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """The rows of a file, the damaged ones apart; a format that can't tell those apart refuses the file.

        Raises:
            InputError: the file as a whole can't be read.
        """
        rows = self.read(path, text, defaults)
        return ResultsFile(rows=tuple(replace(row, number=number) for number, row in enumerate(rows, start=1)))

    def write(self, records: Iterable[Record]) -> str:
        """The records as a file's text; `read` gives equal records back.

        Raises:
            InputError: the format can't tell results.
        """
        raise InputError(f"{self.title} can't hold our results")

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """Tell records in this format, beside what its files hold already.

        Rows of `before` that tell of other problems or devices are kept as they are, byte for byte.

        Args:
            records: the results. Several of one problem on one device are its best and what may stand for it where the
                format can't tell that, the best first.
            before: text of each file that is there, by its name; "" is the output itself.

        Raises:
            InputError: the format can't be written, or a file that is there is not in it.
        """
        told = list(records)
        return Translation({"": self.write(told)}, len(told))

    def translate_rows(
        self, rows: Sequence[FormatRow], records: Iterable[Record], before: Mapping[str, str]
    ) -> Translation:
        """Tell records in this format as `translate` does, where the rows that asked for them are known.

        Args:
            rows: sizes that were tuned.
            records: the results.
            before: text of each file that is there.
        """
        return self.translate(records, before)

    def why_not_in(self, path: Path, text: str, family: str, record: Record) -> str:
        """Why a file of this format, as it is called and begins, is not for a result; "" where it may be.

        Args:
            path: of the file.
            text: what is there, "" for nothing yet.
            family: what the user says that files compute.
            record: the result.
        """
        return ""

    def can_tell(self, config: Config) -> bool:
        """Whether `translate` may tell a generated kernel of this config, for a result that another kernel won."""
        return False

    def merge(self, sources: Sequence[tuple[Path, str]], family: str = "") -> Merged | None:
        """Files of this format as one, with the rows that nobody here can run; None where the format has no such rows.

        Args:
            sources: path and text of each; of rows that tell of the same thing the fastest is kept, on ties the first.
            family: what they compute, where the files do not say.

        Raises:
            InputError: a file can't be read, or they do not belong together.
        """
        return None

    def arrange(self, text: str) -> str:
        """The text of a file of this format with its rows sorted, where the format has an order of its own."""
        return text

    @property
    def tells_results(self) -> bool:
        """Whether `translate` can tell results, all that there is to say of them or not."""
        return self.can_write or type(self).translate is not Format.translate


class ServerFormat(Format, abstract=True):
    """A format that sets the kernels of a server's own, which can be raced with what they take of a config.

    Attributes:
        server: its name.
        computes: the kind of problem (`Problem.kind`) that its kernels are for. Of ``grouped`` ones a row is of the
            two products of a layer of experts, which one config serves.
    """

    server: ClassVar[str]
    computes: ClassVar[str] = "one"

    @property
    def backend(self) -> str:
        """Name of the backend whose kernels are the server's own, where there is one."""
        return self.server.lower()

    @abstractmethod
    def list_sizes(
        self, n: int, k: int, defaults: Defaults, chosen: int = 1, tokens: Sequence[int] = ()
    ) -> list[FormatRow]:
        """The sizes that the server looks up for a weight of N columns of the result and depth K.

        Args:
            n: columns; of experts the inner size of one.
            k: depth; of experts the hidden size.
            defaults: what the user says besides.
            chosen: experts that a token goes to.
            tokens: every M to list; those that the server's own tables have where there are none.

        Raises:
            InputError: the server has no such table for the family and dtype.
        """

    @abstractmethod
    def limits(self, family: str, target: Target) -> SearchLimits:
        """What of a search space the server's kernel takes, with what the server runs today to be tried first.

        Raises:
            InputError: the server has no such table for the family.
        """


class ResultsFormat(Format, abstract=True):
    """The format in which our own results are kept, and what newer versions wrote into them."""

    @abstractmethod
    def read_results(self, path: Path, text: str, defaults: Defaults | None = None) -> ResultsFile:
        """All that a file holds, with the rows that only a newer version can use.

        Args:
            path: for messages.
            text: contents.
            defaults: what holds for a row that does not say.

        Raises:
            InputError: a row is wrong; names file, row, line and field.
        """

    @abstractmethod
    def write_results(self, records: Iterable[Record], schema: int = SCHEMA, newer: Iterable[NewerRow] = ()) -> str:
        """The records as a file's text, with rows of a newer version at the places that they had.

        Args:
            records: in the order of their lines.
            schema: the one that was read, where rows of a newer version are among them.
            newer: rows to write back as they are.

        Raises:
            InputError: a record that a row can't tell.
        """

    @abstractmethod
    def write_sizes(self, rows: Iterable[FormatRow]) -> str:
        """Sizes as a file's text, with how often each is called; `read` gives equal problems back.

        Args:
            rows: in the order of their lines.

        Raises:
            InputError: a problem that a row can't tell.
        """


class CallLog(Plugin, abstract=True):
    """Lines of a library's log that tell which products it was asked for.

    One file may hold lines of several kinds, among those of other programs; each plug-in finds its own.

    Attributes:
        title: what writes them, and how it is asked to, for messages.
    """

    package = "tritongemm.campaigns.logs"
    kind = "call log"
    title: ClassVar[str]

    @abstractmethod
    def read(self, text: str) -> LogContents:
        """What the lines of this kind tell, in their order; nothing where a text has none.

        A line that is cut is a fault, never a call that the library was not asked for.

        Args:
            text: whole lines of a log, with some of other kinds, of several processes and of other programs.
        """
