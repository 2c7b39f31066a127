"""Stage: a model's config.json → rows with their problems, weighted by how often a token passes them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.core.problem import Problem
from tritongemm.formats import make_problem
from tritongemm.plugins import registry
from tritongemm.workloads.model_config import ModelConfig, read_config
from tritongemm.workloads.model_layers import ModelLayer, list_layers
from tritongemm.workloads.model_quantisation import read_quantisation

DEFAULT_TOKENS = (1, 512, 1024, 2048, 3072, 4096, 8192, 16384)


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model.

    Attributes:
        rows: one for each linear layer and number of tokens; equal problems are one row.
        remarks: what is not among them, or is so only under a condition, a line each.
    """

    rows: tuple[FormatRow, ...]
    remarks: tuple[str, ...]


def from_model(place: Path, tp: int, tokens: Sequence[int], defaults: Defaults, every_bias: bool = False) -> ModelSizes:
    """Return the sizes of a model's linear layers, M being the tokens and N the columns of the result.

    Args:
        place: the model's folder, or its config.json.
        tp: GPUs that share each layer.
        tokens: values of M.
        defaults: what the command line says. Layouts and biases are the model's; dtypes are where none is named.
        every_bias: whether each layer is listed with a bias and without, whatever the model has.

    Raises:
        InputError: the file can't be read, its architecture is not known, or a value is missing or wrong.
    """
    config = read_config(place)
    quantised = read_quantisation(config)
    found = list_layers(config, tp, quantised.keeps)
    # The user's values go before the file's.
    is_quantised = quantised.family and defaults.family == Defaults.family and defaults.dtype_a is None
    plain = _in_dtypes_of(config, defaults)
    scaled = plain
    if is_quantised:
        as_file = replace(defaults, family=quantised.family, scales=quantised.scales, dtype_a=quantised.dtype)
        scaled = _in_dtypes_of(config, as_file)
    rows: dict[Problem, FormatRow] = {}
    layers = {replace(one, bias=False): n for one, n in found.layers.items()} if every_bias else found.layers
    for layer, count in layers.items():
        of_layer = plain if layer.kept else scaled
        for bias in ("none", "n") if every_bias and layer.groups == 1 else ("n" if layer.bias else "none",):
            for m in tokens:
                own = replace(of_layer, bias=bias, row_major_a=True, row_major_b=False)
                row = _make_row(config, layer, count, m, own)
                rows[row.problem] = _joined(rows.get(row.problem), row)
    remarks = list(found.left_out)
    if is_quantised:
        kept = ", ".join(dict.fromkeys(layer.name for layer in found.layers if layer.kept))
        scales = f" --scales {quantised.scales}" if quantised.scales else ""
        remarks.append(
            f"its weights are {quantised.dtype} ({quantised.method}), family {quantised.family}{scales}, but for {kept}"
        )
    elif quantised.method:
        remarks.append(
            f"its weights are quantised ({quantised.method}): the sizes are right, but what multiplies them is named "
            "with --family and -dtype_a"
        )
    return ModelSizes(tuple(rows.values()), tuple(f"{config.path}: {text}" for text in remarks))


def _in_dtypes_of(config: ModelConfig, defaults: Defaults) -> Defaults:
    """Return the defaults with the model's dtype: of all operands or, in a scaled family, of the result."""
    family, typical = registry.family_of(defaults.family)
    a = defaults.dtype(defaults.dtype_a or typical.dtype_a)
    scaled = family.scalings(a, defaults.dtype(defaults.dtype_b or typical.dtype_b or a))[0] != (None, None)
    given = defaults.dtype_c if scaled else defaults.dtype_a
    if given is not None:
        return defaults
    if not config.dtype:
        option = "-dtype_c" if scaled else "-dtype_a"
        raise InputError(f"{config.path}: there is neither torch_dtype nor dtype; name one with {option}")
    try:
        name = defaults.dtype(config.dtype)
    except InputError as error:
        raise InputError(f"{config.path}: {error}") from None
    return replace(defaults, dtype_c=name) if scaled else replace(defaults, dtype_a=name)


def _make_row(config: ModelConfig, layer: ModelLayer, count: int, m: int, defaults: Defaults) -> FormatRow:
    try:
        problem = make_problem(defaults, m * layer.chosen, layer.n, layer.k, {"groups": layer.groups})
    except InputError as error:
        raise InputError(f"{config.path}: {layer.name}: {error}") from None
    operation = "linear" if layer.groups == 1 else "grouped_mm"
    return FormatRow(problem, count=count, operation=operation, callers=(layer.name,))


def _joined(first: FormatRow | None, second: FormatRow) -> FormatRow:
    """Return two layers of equal sizes as one row."""
    if first is None:
        return second
    callers = tuple(dict.fromkeys((*first.callers, *second.callers)))
    return replace(first, count=first.count + second.count, callers=callers)
