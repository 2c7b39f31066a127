"""What tests share: stand-ins of GPUs, drivers and evaluators, records and stores."""

from pathlib import Path

FAKES = Path(__file__).parent / "fakes"  # sources of libraries that stand in for a vendor's
ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
