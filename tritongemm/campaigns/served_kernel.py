"""Determines which kernel a campaign's result serves: its own, or what the library chooses by itself."""

from tritongemm.core.config import Config
from tritongemm.core.errors import InputError
from tritongemm.core.record import Record
from tritongemm.plugins import registry


def own_choice() -> Config:
    """Return the config that stands for the baseline's own choice."""
    library = registry.baseline()
    kernel = library.named_kernel(None)
    config = None if kernel is None else library.config_of(kernel)
    if config is None:
        raise InputError(f"{library.label} can't be measured as a candidate, so nothing can be compared with it")
    return config


def served_config(record: Record) -> Config | None:
    """Return the kernel that a result serves; None where that is the library's own choice."""
    return None if record.winner == registry.baseline().name or record.config == own_choice() else record.config
