"""Stage: a model's config.json → rows with their problems, weighted by how often a token passes them."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tritongemm.core.errors import InputError
from tritongemm.core.format_row import Defaults, FormatRow
from tritongemm.core.problem import Operand, Problem
from tritongemm.core.scaling import MX_DEPTH, NV_DEPTH, SCALED_BLOCK, WEIGHT_DEPTHS
from tritongemm.core.values import MAP
from tritongemm.formats import make_problem
from tritongemm.plugins import registry
from tritongemm.workloads.layer_weights import OUTER_NAMES
from tritongemm.workloads.model_config import NAMES, ModelConfig, read_config
from tritongemm.workloads.model_layers import ModelLayer, list_layers

DEFAULT_TOKENS = (1, 512, 1024, 2048, 3072, 4096, 8192, 16384)


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model."""

    rows: tuple[FormatRow, ...]  # one for each linear layer and number of tokens; equal problems are one row
    remarks: tuple[str, ...]  # what is not among them, or is so only under a condition, a line each


def from_model(place: Path, tp: int, tokens: Sequence[int], defaults: Defaults, every_bias: bool = False) -> ModelSizes:
    """Return the sizes of a model's linear layers, M being the tokens and N the columns of the result.

    `tp` GPUs share each layer. Layouts and biases are the model's (with `every_bias`, layers are listed with and
    without); dtypes are where `defaults` names none. What can't be read, known or right raises an InputError.
    """
    config = read_config(place)
    quantised = read_quantisation(config)
    found = list_layers(config, tp, quantised.keeps)
    # The user's values go before the file's, of whose family kept layers are none.
    is_quantised = quantised.family and defaults.family in (Defaults.family, quantised.family) and not defaults.a.dtype
    plain = _in_dtypes_of(config, replace(defaults, family=Defaults.family, scales="") if is_quantised else defaults)
    scaled = plain
    if is_quantised:
        scales = defaults.scales or quantised.scales
        as_file = replace(defaults, family=quantised.family, scales=scales, a=Operand(quantised.dtype))
        if quantised.dtype in (_INT4, _FP4):  # beside activations of the model's type, which factors of int4 have too
            half = "_fp16" * (plain.a.dtype == "fp16" and quantised.dtype == _INT4)
            scales = defaults.scales or quantised.scales + half
            as_file = replace(as_file, scales=scales, a=plain.a, b=Operand(quantised.dtype))
        scaled = _in_dtypes_of(config, as_file)
    rows: dict[Problem, FormatRow] = {}
    layers = {replace(one, bias=False): n for one, n in found.layers.items()} if every_bias else found.layers
    for layer, count in layers.items():
        of_layer = plain if layer.kept else scaled
        for bias in ("none", "n") if every_bias and layer.groups == 1 else ("n" if layer.bias else "none",):
            for m in tokens:
                a, b = of_layer.a._replace(row_major=True), of_layer.b._replace(row_major=False)
                row = _make_row(config, layer, count, m, replace(of_layer, bias=bias, a=a, b=b))
                rows[row.problem] = _joined(rows.get(row.problem), row)
    remarks = list(found.left_out)
    in_blocks = is_quantised and (quantised.family, quantised.scales) == _IN_BLOCKS
    cut = {one.name: 0 for one in found.layers if in_blocks and tp > 1 and not one.kept and one.k % SCALED_BLOCK}
    if cut:
        block = f"blocks of {SCALED_BLOCK} that share a factor"
        remarks.append(f"{', '.join(cut)}: parts of K cut {block}, which servers refuse; choose another --tp")
    if is_quantised:
        kept = ", ".join(dict.fromkeys(layer.name for layer in found.layers if layer.kept))
        scales = f" --scales {scaled.scales}" if scaled.scales else ""
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
    a = defaults.dtype(defaults.a.dtype or typical.a.dtype)
    scaled = family.scalings(a, defaults.dtype(defaults.b.dtype or typical.b.dtype or a))[0] != (None, None)
    if (defaults.c if scaled else defaults.a).dtype:
        return defaults
    if not config.dtype:
        option = "-dtype_c" if scaled else "-dtype_a"
        raise InputError(f"{config.path}: there is neither torch_dtype nor dtype; name one with {option}")
    try:
        name = defaults.dtype(config.dtype)
    except InputError as error:
        raise InputError(f"{config.path}: {error}") from None
    which = "c" if scaled else "a"
    return replace(defaults, **{which: getattr(defaults, which)._replace(dtype=name)})


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


_BLOCKS = [SCALED_BLOCK, SCALED_BLOCK]  # of a weight, which share a scale factor
_IN_BLOCKS, _BY_ROW, _BY_TENSOR = ("a8w8_blockscale", ""), ("a8w8", ""), ("a8w8", "tensor")
_OF_ALGORITHM: Final = {"FP8": _BY_TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": _BY_ROW}  # modelopt's names
_OF_STRATEGIES: Final = {
    ("channel", "token"): _BY_ROW,
    ("tensor", "tensor"): _BY_TENSOR,
    ("block", "group"): _IN_BLOCKS,
}
_INT4, _FP4 = "int4", "fp4e2m1"
_NVFP4: Final = ("a16w4", "weight_16"), _FP4
_MXFP4: Final = ("a16w4", "weight_mx"), _FP4
_OF_MXFP4: Final = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": MX_DEPTH}
_OF_NVFP4: Final = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NV_DEPTH}
_IN_ORDER: Final = (None, False, "static", "weight")  # of K, what compressed-tensors says of groups of neighbours
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
# An expression of a file may take no more than a moment: no repeated groups, few repetitions.
_MOST_REPETITIONS = 4
_LONGEST_PATTERN = 200  # characters
_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")


@dataclass(frozen=True)
class Quantisation:
    """How a model's weights are quantised."""

    method: str = ""  # the file's name of it, "" where they are not
    family: str = ""  # of products with such weights; "" where it is not supported
    scales: str = ""  # granularity of that family's scale factors; "" for its usual one
    dtype: str = "fp8"  # of the weights
    ignored: tuple[re.Pattern[str], ...] = ()  # what names of modules whose weights are not quantised match

    def keeps(self, name: str) -> bool:
        """Return whether the weight of a module, by its path in the language model, is not quantised."""
        return any(pattern.match(prefix + name) for pattern in self.ignored for prefix in _PREFIXES)


def read_quantisation(config: ModelConfig) -> Quantisation:
    """Return how a model's weights are quantised."""
    found = config.quantisation
    if not found:
        return Quantisation()
    of_modelopt = found.get("quantization") or {}
    config.require(MAP, "quantization", of_modelopt)
    method = str(found.get("quant_method") or ("modelopt" if of_modelopt else "in some way"))
    ignored: list[str] = []
    for key in _IGNORED:
        names = found.get(key) or of_modelopt.get(key) or []
        config.require(NAMES, key, names)
        ignored += names
    found = {**of_modelopt, **found}
    ignored += _skipped(config, found) if method in ("gptq", "awq") else []  # GPTQModel writes both
    (family, scales), dtype = _find_fp4(method, found) or _find_family(method, found)
    return Quantisation(method, family, scales, dtype, tuple(_compile(config, pattern) for pattern in ignored))


def _find_fp4(method: str, found: Mapping[str, Any]) -> tuple[tuple[str, str], str] | None:
    """Return what `_find_family` does, of fp4 with factors for 16 or 32 along K; activations may stay in bf16 then."""
    if method == "modelopt":
        is_nvfp4 = found.get("quant_algo") == "NVFP4" and found.get("group_size", NV_DEPTH) == NV_DEPTH
        return _NVFP4 if is_nvfp4 else None
    groups = found.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, Mapping) and len(groups) == 1 else None
    side = group.get("weights") if isinstance(group, Mapping) and group.get("targets") == ["Linear"] else None
    if method != "compressed-tensors" or not isinstance(side, Mapping):
        return None
    kinds = ((_OF_NVFP4, _NVFP4), (_OF_MXFP4, _MXFP4))
    return next((known for kind, known in kinds if kind.items() <= side.items()), None)


def _find_family(method: str, found: Mapping[str, Any]) -> tuple[tuple[str, str], str]:
    """Return the family and granularity, "" where there is none, and the type of the weights."""
    none = ("", ""), ""
    if method in ("gptq", "awq"):
        symmetric = found.get("sym", True) if method == "gptq" else not found.get("zero_point", True)
        usual = not found.get("desc_act") and not _differs_between_modules(found)
        return _of_int4(found.get("bits"), usual, found.get("group_size"), symmetric)
    if method == "fp8":
        if found.get("weight_block_size") == _BLOCKS:
            return _IN_BLOCKS, "fp8"
        is_static = found.get("activation_scheme") == "static" and not found.get("weight_block_size")
        return (_BY_TENSOR, "fp8") if is_static else none
    if method == "mxfp4":
        return _MXFP4
    if method == "fbgemm_fp8":
        return _BY_ROW, "fp8"
    if method == "modelopt":
        return _OF_ALGORITHM.get(str(found.get("quant_algo")), ("", "")), "fp8"
    groups = found.get("config_groups")
    if method != "compressed-tensors" or not isinstance(groups, Mapping) or len(groups) != 1:
        return none
    (group,) = groups.values()
    of_group = group if isinstance(group, Mapping) else {}
    if isinstance(side := of_group.get("weights"), Mapping) and of_group.get("input_activations") is None:
        strategy, kind = side.get("strategy"), (of_group.get("targets"), side.get("type"))
        usual = side.get("actorder") in _IN_ORDER and kind == (["Linear"], "int")
        group = {"group": side.get("group_size"), "channel": -1}.get(str(strategy))
        return _of_int4(side.get("num_bits"), usual, group, side.get("symmetric", True))
    sides = [side for key in ("weights", "input_activations") if isinstance(side := of_group.get(key), Mapping)]
    if len(sides) != 2 or of_group.get("targets") != ["Linear"]:
        return none
    weights, activations = sides
    if any(side.get("num_bits") != 8 or side.get("type") != weights.get("type") for side in sides):
        return none
    dtype = {"float": "fp8", "int": "int8"}.get(str(weights.get("type")), "")
    family = _OF_STRATEGIES.get((str(weights.get("strategy")), str(activations.get("strategy"))), ("", ""))
    in_blocks = weights.get("block_structure") == _BLOCKS and activations.get("group_size") == SCALED_BLOCK
    symmetric = all(side.get("symmetric", True) for side in sides)
    if not dtype or not symmetric or (family == _IN_BLOCKS and not (in_blocks and dtype == "fp8")):
        return none
    return family, dtype


def _skipped(config: ModelConfig, found: Mapping[str, Any]) -> list[str]:
    """Return the patterns of modules that GPTQModel's ``dynamic`` leaves unquantised, those that begin with ``-:``."""
    rules = config.require(MAP, "dynamic", found.get("dynamic") or {})
    return [f"re:{pattern[2:]}" for pattern in map(str, rules) if pattern.startswith("-:")]


def _differs_between_modules(found: Mapping[str, Any]) -> bool:
    """Return whether GPTQ's values are not those of all linear layers of the decoder, and of these alone."""
    rules = [rule for name, rule in (found.get("dynamic") or {}).items() if not name.startswith("-:")]
    other = [rule for rule in rules if not isinstance(rule, Mapping) or not rule.items() <= found.items()]
    return bool(other or found.get("lm_head") or found.get("modules_in_block_to_quantize"))


def _of_int4(bits: object, usual: bool, group: object, symmetric: object) -> tuple[tuple[str, str], str]:
    """Return the family of weights of four bits, whose groups along K have -1 for all of it; none of unusual ones."""
    if bits != 4 or not usual or not isinstance(group, int):
        return ("", ""), ""
    depth = next((depth for depth in reversed(WEIGHT_DEPTHS) if group == -1 or (group > 0 and group % depth == 0)), 0)
    return (("a16w4", f"weight_{depth}{'' if symmetric else '_zeros'}"), _INT4) if depth else (("", ""), "")


def _compile(config: ModelConfig, pattern: str) -> re.Pattern[str]:
    """Return the pattern of ignored modules' names: an expression after ``re:``, one with ``*``, a name or its end."""
    inner = re.escape(OUTER_NAMES.sub("", pattern))
    text = (
        pattern[3:] if pattern.startswith("re:")
        else fnmatch.translate(pattern)[:-2] + r"(\..*)?$" if "*" in pattern  # or what is in such a module
        else rf"(.*\.)?{inner}(\..*)?$"
    )  # fmt: skip
    is_long = len(pattern) > _LONGEST_PATTERN or len(re.findall(r"[*+{]", pattern)) > _MOST_REPETITIONS
    try:
        if not is_long and not re.search(r"\)[*+{]", pattern):
            return re.compile(text)
    except re.error:
        pass
    raise InputError(
        f"{config.path}: quantization_config ignores {pattern[:_LONGEST_PATTERN]!r}, which is no simple expression; "
        "list the modules by their names"
    )
