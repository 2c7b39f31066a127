"""Read a results file, of any format, and print where time is won.

python examples/read_results.py [FILE]
"""

import argparse
from collections import Counter
from math import exp, log
from pathlib import Path

from tritongemm.formats import Defaults
from tritongemm.workloads import sizes

FILE = Path(__file__).with_name("results") / "h200_48_sizes.yaml"

parser = argparse.ArgumentParser(description="Print where time is won.")
parser.add_argument("file", type=Path, nargs="?", default=FILE)
file = parser.parse_args().file

records = [row.record for row in sizes.from_file(file, Defaults()) if row.record is not None]
gains = [(r.library_seconds / r.seconds, r) for r in records if r.seconds and r.library_seconds]
for gain, record in sorted(gains, key=lambda pair: -pair[0]):
    problem = record.problem
    print(f"M {problem.m:5} N {problem.n:5} K {problem.k:5} {record.seconds * 1e6:8.2f} us {gain:.3f} {record.winner}")
print(
    "geometric mean of the gains:", f"{exp(sum(log(gain) for gain, _ in gains) / len(gains)):.3f}" if gains else "none"
)
print("winners:", ", ".join(f"{name} {count}" for name, count in Counter(r.winner for r in records).most_common()))
