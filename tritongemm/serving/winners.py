"""Which backend won a record, and what of it can be launched at run time."""

from tritongemm.core.errors import InputError, UnavailableError
from tritongemm.core.record import Record
from tritongemm.core.support import SUPPORTED, Support
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, LibraryBackend


def find_winner(record: Record) -> Backend | Support:
    """Return the backend that won a record, or why it can't be asked here."""
    try:
        winner: Backend = registry.get(Backend, record.winner)
    except InputError:
        return Support(f"its winner {record.winner} can't be called from here")
    except UnavailableError as error:
        return Support(str(error))
    return winner


def is_launchable(record: Record) -> Support:
    """Return whether a kernel, or an algorithm of a library, that can be launched by itself won a record, measured."""
    key = record.problem.key
    if record.predicted:
        return Support(f"{key}: its record is a prediction (timer: model); tune it on the GPU")
    if baseline_won(record):
        return Support(f"{record.winner} won the tuning of {key} on {record.target}")
    winner = find_winner(record)
    if isinstance(winner, Support):
        return Support(f"{key}: {winner}")
    if record.winner != record.config.backend:
        return Support(f"{key}: its winner {record.winner} can't be called from here")
    return SUPPORTED


def baseline_won(record: Record) -> bool:
    """Return whether the library that users run today won a record, by a kernel of its own choice."""
    winner = find_winner(record)
    if isinstance(winner, Backend) and winner.baseline:
        return True
    return record.winner == record.library and record.winner != record.config.backend


def rounds_to_tf32(record: Record) -> bool:
    """Return whether the kernel that won a record rounds float32 operands to tf32."""
    if record.problem.a.dtype != "fp32":
        return False
    if isinstance(find_winner(record), LibraryBackend):
        return True  # a library is asked for tf32 on any target
    from tritongemm.search_spaces import loader  # which reads YAML

    return record.target in loader.target_names() and loader.load_target(record.target).has("tf32")
