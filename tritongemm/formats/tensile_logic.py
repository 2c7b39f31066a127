"""Format: the library logic of hipBLASLt's build (Tensile), where it is of exact sizes (``…/Equality/*.yaml``).

Each file has the solutions of one problem type and architecture, and the sizes that take them. Merged, the sizes of
later files are added with the solutions that they need, which is what `TensileMergeLibrary` does to a folder; here the
file that is written is another one, or replaced completely. hipBLASLt must be built anew with it.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow, Merged, NamedKernel, ResultsFile, Translation
from tritongemm.core.record import Record
from tritongemm.core.support import Support
from tritongemm.formats._column_major import LIBRARY, ColumnMajor, column_major, winning_solution
from tritongemm.formats._rows import FULL_FLOAT32, KeptError, RowFaults
from tritongemm.formats._tensile_text import Logic, Size, begins_logic, read_logic, shown
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Backend, WritableFormat
from tritongemm.system.printable import printable

# Numbers of types, as far as all versions of Tensile agree on them.
_TYPES = {0: "fp32", 4: "fp16", 6: "int32", 7: "bf16", 8: "int8"}
_UNMEASURED = 0.0  # the efficiency of a written size, as TensileMergeLibrary's --no_eff has it
_MOST_NAMED = 20  # sizes in a note


class TensileLogic(WritableFormat):
    """Tensile's library logic of exact sizes."""

    title = "Tensile's library logic of exact sizes (Equality)"

    def recognises(self, path: Path, text: str) -> bool:
        """Return whether it begins as a logic file; in a folder, whether it has the name of one."""
        return begins_logic(text) if text else "_Cijk_" in path.name and path.suffix == ".yaml"

    def read_usable(self, path: Path, text: str, defaults: Defaults) -> ResultsFile:
        """Return a size for each dense row of the table, with its solution; a warning names others."""
        logic, faults = read_logic(path, text), RowFaults(path)
        target, units = logic.target
        rows = []
        for number, (size, (index, _)) in enumerate(logic.sizes.items(), start=1):
            line = logic.lines[size]
            with faults.of_row(number, line):
                problem = _product(logic, size).problem({})
                library = registry.get(Backend, registry.resolve(Backend, LIBRARY))
                config = library.config_of(NamedKernel(LIBRARY, logic.solutions[index].name))
                rows.append(FormatRow(problem, config, line=line, number=number, target=target, compute_units=units))
        return faults.beside(rows)

    def merge(self, sources: Sequence[tuple[Path, str]], family: str = "") -> Merged | None:
        """Return the first file with the sizes of the later ones, and the solutions that those need.

        Of a size that several have, the more efficient solution is kept, or the later file's if one has no efficiency.
        """
        merged, *others = (read_logic(path, text) for path, text in sources)
        notes = []
        for other in others:
            if different := merged.differs(other):
                raise InputError(f"{other.path} is of another {different} than {merged.path}; they can't be one file")
            notes += _merge(merged, other)
        used = {index for index, _ in merged.sizes.values()}
        idle = len(merged.solutions) - len(used)
        if idle and others:
            notes.append(f"{merged.path}: {idle} solutions are those of no size any more; they are kept")
        return Merged(merged.text(), tuple(notes)) if others else Merged(sources[0][1])

    def translate(self, records: Iterable[Record], before: Mapping[str, str]) -> Translation:
        """Return the files with the sizes of these results, each in the file of its solution."""
        files = {name: read_logic(Path(name or "the file"), text) for name, text in before.items() if text.strip()}
        indices = {name: _by_template(logic) for name, logic in files.items()}
        written, omitted = set[str](), list[tuple[Record, str]]()
        count = 0
        for record in records:
            place = _place(record, files, indices)
            if isinstance(place, Support):
                omitted.append((record, place.reason))
                continue
            name, size, index = place
            logic = files[name]
            if logic.sizes.get(size, (-1, 0.0))[0] != index:
                logic.sizes[size] = index, _UNMEASURED
                written.add(name)
            count += 1
        texts = {name: files[name].text() if name in written else text for name, text in before.items()}
        return Translation({name: text for name, text in texts.items() if text}, count, tuple(omitted))


def _place(
    record: Record, files: Mapping[str, Logic], indices: Mapping[str, Mapping[str, int]]
) -> tuple[str, Size, int] | Support:
    """Return the place of a result: the file, its size there, and the solution's number; or why there is none."""
    kernel, product = winning_solution(record), column_major(record.problem)
    if isinstance(kernel, Support):
        return kernel
    if isinstance(product, Support):
        return product
    if not files:
        return Support("the file must be a copy of the logic file that has its solution; copy that first")
    for name, logic in files.items():
        index = indices[name].get(kernel.name)
        if index is not None and _fits(logic, product, record):
            return name, product.sizes, index
    where = "the file has" if len(files) == 1 else f"{len(files)} files have"
    return Support(f"{where} no solution {kernel.name} for {record.target} and these types; merge the file that has it")


def _by_template(logic: Logic) -> dict[str, int]:
    """Return the numbers of a file's solutions, by the templates of their configs."""
    library = registry.get(Backend, registry.resolve(Backend, LIBRARY))
    configs = {i: library.config_of(NamedKernel(LIBRARY, s.name)) for i, s in logic.solutions.items()}
    return {config.template: index for index, config in configs.items() if config is not None}


def _fits(logic: Logic, product: ColumnMajor, record: Record) -> bool:
    """Return whether a file is of a result's transposes and device."""
    target, units = logic.target
    device = target in ("", record.target) and units in (0, record.compute_units)
    return device and _transposes(logic) == product.transposes


def _transposes(logic: Logic) -> str:
    return "".join("T" if logic.problem_type.get(f"Transpose{side}") else "N" for side in "AB")


def _product(logic: Logic, size: Size) -> ColumnMajor:
    """Return the product of a row."""
    kind: dict[str, Any] = logic.problem_type
    numbers = [kind.get(key, kind.get("DataType")) for key in ("DataTypeA", "DataTypeB", "DestDataType")]
    types = [_TYPES.get(one, "") if type(one) is int else "" for one in numbers]
    if not all(types):
        raise KeptError(f"its types {printable(str(numbers), 80)} are none that are tuned here")
    if "fp32" in types[:2] and not kind.get("F32XdlMathOp"):
        raise KeptError(FULL_FLOAT32)
    if len(size) > 4:
        raise KeptError(f"the rows of {shown(size)} are apart, which a size can't hold")
    m, n, batch, k = size
    a, b, c = types
    return ColumnMajor(_transposes(logic), m, n, batch, k, a, b, c)


def _merge(merged: Logic, other: Logic) -> list[str]:
    """Add the sizes of another file; return a line for each decision between the two."""
    stayed, replaced = list[str](), list[str]()
    for size, (index, efficiency) in other.sizes.items():
        solution, known = other.solutions[index], merged.sizes.get(size)
        if known is not None and merged.solutions[known[0]].name == solution.name:
            continue
        if known is not None and known[1] > 0 and efficiency > 0 and efficiency <= known[1]:
            stayed.append(shown(size))
            continue
        if known is not None:
            replaced.append(shown(size))
        merged.sizes[size] = merged.add_solution(solution), efficiency
    changes = (
        (stayed, f"stay as in {merged.path}, which is as efficient"),
        (replaced, "replace those of the file before"),
    )
    return [f"{other.path}: {_listed(sizes)} {what}" for sizes, what in changes if sizes]


def _listed(sizes: Sequence[str]) -> str:
    more = f" and {len(sizes) - _MOST_NAMED} others" if len(sizes) > _MOST_NAMED else ""
    return f"{len(sizes)} sizes ({', '.join(sizes[:_MOST_NAMED])}{more})"
