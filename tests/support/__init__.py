"""What tests share: stand-ins of GPUs, drivers and evaluators, records and stores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

FAKES = Path(__file__).parent / "fakes"  # sources of libraries that stand in for a vendor's, and of small kernels
ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """A function that raises, whatever it is given."""

    def fail(*given: object, **named: object) -> Any:
        raise error

    return fail
