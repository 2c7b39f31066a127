"""What files say of problems of every kind: keys, lines of journals and rows must not change, for files have them."""

import json
from pathlib import Path

from tests.support.tables import each
from tritongemm.core.format_row import Defaults
from tritongemm.formats import results_format
from tritongemm.results.schema import read_problem

# Three lines of each: its key, the JSON of a journal, and a row of a file of sizes.
_LINES = Path(__file__).with_name("problems.txt").read_text().splitlines()


@each(("key", "text", "row"), list(zip(*[iter(_LINES)] * 3, strict=True)))
def test_texts_of_a_problem_stay_what_they_are(key: str, text: str, row: str) -> None:
    problem = read_problem(json.loads(text))
    assert problem.key == key
    assert json.dumps(problem.to_json()) == text
    assert [read.problem for read in results_format().read(Path("a.yaml"), f"- {row}\n", Defaults())] == [problem]
