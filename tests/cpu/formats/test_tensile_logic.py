from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import foreign_rows
from tests.support.nouns import Capsys, Defaults, Problem, Record, WritableFormat, cases, registry, results_format
from tests.support.refusals import refuses
from tritongemm.cli import convert
from tritongemm.core.errors import InputError, UntunableRowsWarning

FORMAT = registry.get(WritableFormat, "tensile_logic")
KIND: dict[str, Any] = {
    "Batched": True, "DataType": 7, "DataTypeA": 7, "DataTypeB": 7, "DestDataType": 7, "IndexAssignmentsA": [3, 0, 2],
    "TransposeA": True, "TransposeB": False, "UseScaleAB": "",
}  # fmt: skip


def solution(index: int, tile: str, **other: Any) -> dict[str, Any]:
    name = f"Cijk_Alik_Bljk_BBS_BH_UserArgs_MT{tile}_MI16x16x1_SN_GRVWB8_GSU1"
    facts = {
        "1LDSBuffer": 1,
        "CustomKernelName": "",
        "ISA": [9, 4, 2],
        "InternalSupportParams": {"UseUniversalArgs": True},
    }
    return {
        **facts, "ProblemType": KIND, "SolutionIndex": index, "SolutionNameMin": name, "WorkGroup": [16, 16, 1],
        **other,
    }  # fmt: skip


def logic(
    table: Mapping[Sequence[int], tuple[int, float]], tiles: Sequence[str] = ("64x64x64", "128x64x64"), **change: Any
) -> str:
    """A file as Tensile's own writer makes it."""
    elements: dict[str, Any] = {
        "version": {"MinimumRequiredVersion": "4.33.0"}, "schedule": "aquavanjaram",
        "target": {"Architecture": "gfx942", "CUCount": 304}, "devices": ["Device 74a1", "Device 74a0"], "kind": KIND,
        "solutions": [solution(i, tile) for i, tile in enumerate(tiles)], "order": [2, 3, 0, 1],
        "sizes": [[list(size), list(found)] for size, found in table.items()], "range": None, "more": None,
        "metric": "DeviceEfficiency", "type": "Equality",
    }  # fmt: skip
    text = yaml.dump(
        list({**elements, **change}.values()),
        Dumper=type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True}),
        default_flow_style=None, explicit_start=True, explicit_end=True, sort_keys=False,
    )  # fmt: skip
    return str(text)


A, B, C = (6144, 16, 1, 4096), (64, 8, 1, 32), (64, 8, 4, 32)
APART = (64, 8, 1, 32, 64, 64, 48, 48)
BASE = logic({A: (0, 0.0), B: (1, 120.5), APART: (0, 0.0)})
PATH = Path("aquavanjaram_Cijk_Alik_Bljk_BBS_BH_UserArgs.yaml")


def problem(m: int = 16, n: int = 6144, k: int = 4096, **more: Any) -> Problem:
    return foreign_rows.product(m, n, k, **more)


def result(of: Problem, tile: str = "128x64x64", **more: Any) -> Record:
    config = replace(foreign_rows.algorithm(5, 9), template=solution(0, tile)["SolutionNameMin"])
    return foreign_rows.result(of, config, **{"compute_units": 304, **more})


def test_sizes_solutions_and_where_results_are_written() -> None:
    with pytest.warns(UntunableRowsWarning, match="are apart"):
        first, second = FORMAT.read(PATH, BASE, Defaults.of("int8"))
    assert first.problem == problem() and (first.target, first.compute_units) == ("gfx942", 304)
    assert second.problem == problem(8, 64, 32) and second.config is not None
    assert second.config.template == solution(1, "128x64x64")["SolutionNameMin"] and second.config.tile == (64, 128, 64)
    assert "[64, 8, 1, 32]" in BASE.splitlines()[(second.line or 0) - 1]
    single = {**KIND, "DataType": 0, "DataTypeA": 0, "DataTypeB": 0, "DestDataType": 0}
    rounded = logic({A: (0, 0.0)}, kind={**single, "F32XdlMathOp": 9})
    assert [row.problem.a.dtype for row in FORMAT.read(PATH, rounded, Defaults())] == ["fp32"]
    with pytest.warns(UntunableRowsWarning, match="multiplies full float32"):
        assert not FORMAT.read(PATH, logic({A: (0, 0.0)}, kind={**single, "F32XdlMathOp": 0}), Defaults())
    written = FORMAT.translate([result(problem()), result(problem(32, 128, 64))], {"": BASE})
    assert written.count == 2 and not written.omitted
    expected = BASE.replace("[6144, 16, 1, 4096]\n    - [0, 0.0]", "[6144, 16, 1, 4096]\n    - [1, 0.0]")
    start, end = expected.split("- null\n", 1)
    assert written.files[""] == f"{start}  - - [128, 32, 1, 64]\n    - [1, 0.0]\n- null\n{end}"
    assert FORMAT.translate([result(problem(8, 64, 32))], {"": BASE}).files[""] == BASE, "it is there already"
    folder = {"a.yaml": logic({}, ("32x32x32",)), "b.yaml": BASE}
    both = FORMAT.translate([result(problem())], folder)
    assert both.files["a.yaml"] == folder["a.yaml"] and both.files["b.yaml"] != BASE


def test_ends_of_lines_stay_as_they_are(tmp_path: Path) -> None:
    """A checkout on Windows has CRLF in every line; the file that is merged into says how the lines end."""
    tuned = logic({C: (1, 0.0)}, ("128x64x64", "256x64x64"))
    plain, crlf = tmp_path / PATH, tmp_path / "crlf" / PATH
    crlf.parent.mkdir()
    plain.write_bytes(BASE.encode())
    crlf.write_bytes(BASE.replace("\n", "\r\n").encode())
    (tmp_path / "tuned.yaml").write_bytes(tuned.encode())
    for name, file in (("plain", plain), ("crlf", crlf)):
        words = [str(file), str(tmp_path / "tuned.yaml"), "-o", str(tmp_path / f"{name}.yaml"), "--to", "tensile_logic"]
        assert convert.main(words) == 0
    merged = (tmp_path / "plain.yaml").read_bytes()
    assert (tmp_path / "crlf.yaml").read_bytes() == merged.replace(b"\n", b"\r\n") != merged
    written = FORMAT.translate([result(problem())], {"": crlf.read_bytes().decode()})
    assert written.count == 1 and written.files[""].count("\n") == written.files[""].count("\r\n")
    for mixed in (BASE.replace("\n", "\r\n", 3), BASE.replace("\n", "\r", 3), f"{BASE}\r"):
        with pytest.raises(InputError, match=r"lines that end in several ways \(LF, CRLF or CR\)"):
            FORMAT.merge([(PATH, BASE), (Path("mixed.yaml"), mixed)])


def test_files_are_merged_and_the_more_efficient_stays() -> None:
    """A new size brings its solution; sizes whose rows are apart are other sizes."""
    tuned = logic({C: (2, 0.0), A: (1, 0.0), APART[:4]: (0, 200.0)}, ("128x64x64", "256x64x64", "32x32x32"))
    merged = FORMAT.merge([(PATH, BASE), (Path("tuned.yaml"), tuned)])
    assert merged is not None
    found = yaml.safe_load(merged.text)
    names = [one["SolutionNameMin"].split("_MT")[1].split("_")[0] for one in found[5]]
    assert names == ["64x64x64", "128x64x64", "32x32x32", "256x64x64"]
    assert [one["SolutionIndex"] for one in found[5]] == [0, 1, 2, 3]
    assert found[7] == [[list(A), [3, 0.0]], [list(B), [1, 120.5]], [list(APART), [0, 0.0]], [list(C), [2, 0.0]]]
    assert found[5][2] == {**yaml.safe_load(tuned)[5][2], "SolutionIndex": 2}
    assert merged.notes == ("tuned.yaml: 1 sizes ([6144, 16, 1, 4096]) replace those of the file before",)
    assert merged.text.startswith(BASE[: BASE.index("- [2, 3, 0, 1]")]), "what was there is there byte for byte"
    again = FORMAT.merge([(PATH, merged.text), (Path("tuned.yaml"), tuned)])
    assert again is not None and again.text == merged.text
    slower, faster = (logic({B: (0, efficiency)}) for efficiency in (119.0, 121.0))
    stays = FORMAT.merge([(PATH, BASE), (Path("x.yaml"), slower)])
    assert stays is not None and stays.text == BASE and "1 sizes ([64, 8, 1, 32]) stay as in" in stays.notes[0]
    moved = FORMAT.merge([(PATH, BASE), (Path("x.yaml"), faster)])
    assert moved is not None and "- [0, 121.0]" in moved.text
    assert any("1 solutions are those of no size any more" in note for note in moved.notes)


@cases(
    (logic({A: (0, 0.0)}, kind={**KIND, "DataTypeA": 4}), "is of another problem type than"),
    (logic({A: (0, 0.0)}, target="gfx950"), "is of another architecture than"),
    (logic({A: (0, 0.0)}, version={"MinimumRequiredVersion": "4.40.0"}), "is of another version of Tensile"),
    (logic({A: (0, 0.0)}, solutions=[solution(0, "64x64x64", DepthU=32)]), "has other parameters than in the file"),
)
def test_what_does_not_belong_together_is_refused(text: str, complaint: str, /) -> None:
    refuses(complaint, FORMAT.merge, [(PATH, logic({A: (1, 0.0)})), (Path("other.yaml"), text)])


TWICE = [solution(0, "1x1x1"), solution(0, "2x1x1")]


@cases(
    (logic({A: (0, 0.0)}, type="GridBased"), "of kind GridBased; only exact sizes"),
    (logic({A: (7, 0.0)}), "names solution 7, which is not there"),
    (logic({A: (0, 0.0)}, solutions=TWICE), "has number 0, as an earlier one does"),
    (logic({}, sizes=[[list(A), [0, 0.0]], [list(A), [1, 0.0]]]), "is there already; keep one of them"),
    (logic({}, sizes=[[[1, 2, 3], [0, 0.0]]]), "must have M, N, batch and K"),
    (logic({}, sizes=[[[1, 2, 3, 4], [0]]]), r"must be \[\[M, N, batch, K\], \[solution, efficiency\]\]"),
    (logic({}, sizes={}), "must be the table of sizes"),
    (logic({A: (0, 0.0)}).replace("CustomKernelName: ''", "CustomKernelName: *x"), "an anchor or an alias"),
    (BASE[: len(BASE) // 2], "of the 12 elements of a logic file; it may be cut"),
    ("---\nMinimumRequiredVersion: 5\nSolutions: []\n", "a logic file that is a map"),
    (BASE.replace("    SolutionNameMin", "    SolutionName"), "must have a SolutionIndex and a SolutionNameMin"),
    (BASE.replace("- Equality", "- " + "[" * 500), "element 12 is no YAML"),
)
def test_a_damaged_file_is_refused_by_name(text: str, complaint: str, /) -> None:
    refuses(rf"^{PATH}.*{complaint}", FORMAT.read, PATH, text, Defaults())


def test_the_command_writes_a_copy(tmp_path: Path, capsys: Capsys) -> None:
    base, tuned, out = (tmp_path / name for name in ("base_Cijk_x.yaml", "tuned_Cijk_x.yaml", "new_Cijk_x.yaml"))
    base.write_text(BASE, encoding="utf-8")
    tuned.write_text(logic({C: (0, 0.0)}, ("32x32x32",)), encoding="utf-8")
    assert convert.main([str(base), str(tuned), "-o", str(out)]) == 0
    assert "2 files merged" in capsys.readouterr().out and "[64, 8, 4, 32]" in out.read_text(encoding="utf-8")
    assert base.read_text(encoding="utf-8") == BASE
    (tmp_path / "final.yaml").write_text(results_format().write([result(problem())]), encoding="utf-8")
    assert convert.main([str(tmp_path / "final.yaml"), "-o", str(out), "--to", "tensile_logic"]) == 0
    assert yaml.safe_load(out.read_text(encoding="utf-8"))[7][0] == [list(A), [1, 0.0]]
    before = out.read_bytes()
    tuned.write_text(logic({C: (9, 0.0)}), encoding="utf-8")
    assert convert.main([str(tuned), "-o", str(out)]) == 2 and out.read_bytes() == before
    assert "names solution 9" in capsys.readouterr().err


def test_the_command_writes_a_folder(tmp_path: Path) -> None:
    copy = tmp_path / "mine"
    copy.mkdir()
    texts = {"a_Cijk_x.yaml": logic({}, ("32x32x32",)), "b_Cijk_x.yaml": BASE, "README.md": "of mine"}
    for name, text in texts.items():
        (copy / name).write_text(text, encoding="utf-8")
    (tmp_path / "final.yaml").write_text(results_format().write([result(problem())]), encoding="utf-8")
    assert convert.main([str(tmp_path / "final.yaml"), "-o", str(copy), "--to", "tensile_logic"]) == 0
    changed = {name for name, text in texts.items() if (copy / name).read_text(encoding="utf-8") != text}
    assert changed == {"b_Cijk_x.yaml"} and sorted(path.name for path in copy.iterdir()) == sorted(texts)
