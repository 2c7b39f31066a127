"""Errors a user can act on.

TritonGemmError            everything below; the CLI prints it without a traceback and exits 2
├── InputError             a size, file, row, dtype or option is wrong: says which, and what to write instead
│   └── NewerFileError     a newer version of tritongemm wrote the file
├── TargetError            an unknown target, or a device that is not there
├── OutputError            the output can't be written, or another run holds it
├── WorkspaceError         no memory for what the programs of a kernel share; where `mm` meets it, PyTorch computes
├── UnavailableError       an optional library, tool or plug-in is missing: says which and where it was looked for
│   └── ToolKilledError    a compiler was killed from outside over and over: it may go well the next time
└── DriverError            a GPU driver call failed: carries the vendor's error name and text

Three warnings are no errors: the rest of the file is used.

UntunableRowsWarning       rows of another tool's file are of products that nothing here computes
DamagedFileWarning         a file holds what can't be used any more
RemarkWarning              a file says what does not count, or leaves out what is then taken to be usual
"""


class TritonGemmError(Exception):
    """Base of every error meant for the user."""


class InputError(TritonGemmError):
    """Wrong input, named by file, row and field."""


class NewerFileError(InputError):
    """A file of a newer version of tritongemm, which is neither read nor replaced."""

    def __init__(self, path: object, schema: int, known: int) -> None:
        super().__init__(
            f"{path}: a newer version of tritongemm wrote it (schema {schema}; this one reads up to {known}); update "
            "tritongemm, or name another file"
        )


class TargetError(TritonGemmError):
    """Unknown target or missing device."""


class OutputError(TritonGemmError):
    """Output not writable, or held by another run."""


class WorkspaceError(TritonGemmError):
    """No memory for what the programs of a kernel share."""


class UnavailableError(TritonGemmError):
    """A plug-in, library or tool this machine does not have."""


class ToolKilledError(UnavailableError):
    """A compiler that something else killed, as the system does where memory is short."""


class UntunableRowsWarning(UserWarning):
    """Rows of another tool's file are right, but of products that nothing here computes."""


class DamagedFileWarning(UserWarning):
    """A file holds what can't be read: a damaged line, or an edit that makes no sense."""


class RemarkWarning(UserWarning):
    """A file is read in a way that its reader should know: columns that are ignored, values that are taken as usual."""


class DriverError(TritonGemmError):
    """A call of a GPU driver's function failed, with a status and the vendor's name of that."""

    def __init__(self, call: str, code: int, name: str, text: str = "") -> None:
        super().__init__(f"{call} failed: {name} ({code}){': ' + text if text else ''}")
        self.call, self.code, self.name = call, code, name
