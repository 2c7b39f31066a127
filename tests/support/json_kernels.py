"""Stands in for kernels on a GPU whose code objects are JSON: they read their parameters, and compute on the CPU.

A product's code has its ``name`` and its ``problem``; a kernel beside the products its name as ``kernel``, its
``signature`` and its ``constants``.
"""

import ctypes
import json
import struct
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from tritongemm.core.dtypes import DTYPES
from tritongemm.core.helper_kernel import ACTIVATIONS
from tritongemm.core.problem import Problem

TOKENS = 7  # of a mixture of experts, which only the grid of its last kernel has
_PACKED = {"i32": "i", "i64": "q"}


class Interpreted:
    """Stands in for a kernel on the GPU: reads its parameters, and computes on the CPU."""

    attributes: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, code: bytes, launched: list[str]) -> None:
        self._code, self._launched = json.loads(code), launched
        self.params = bytearray()

    def prepare(self, *arguments: Any) -> "Interpreted":
        """A launch of its own, as a function may have several."""
        prepared = Interpreted(json.dumps(self._code).encode(), self._launched)
        prepared.params = bytearray(arguments[3])
        return prepared

    def launch(self, stream: int) -> None:
        if "problem" in self._code:
            self._launched.append(self._code["name"])
            self._multiply(Problem.from_json(self._code["problem"]))
        else:
            self._launched.append(self._code["kernel"])
            kinds = ["Q" if kind[0] == "*" else _PACKED[kind] for kind in self._code["signature"].values()]
            given = dict(
                zip(self._code["signature"], struct.unpack_from("=" + "".join(kinds), self.params), strict=True)
            )
            HELPERS[self._code["kernel"]](self._code["signature"], self._code["constants"], given)

    def _multiply(self, problem: Problem) -> None:
        from tritongemm.plugins import registry
        from tritongemm.plugins.contracts import Family

        names = list(problem.operands)
        *addresses, m, n, k = struct.unpack_from(f"={len(names)}Q3i", self.params)
        rest = struct.unpack_from("=3i", self.params, 8 * len(names) + 12)
        apart = struct.unpack_from("=3q", self.params, 8 * len(names) + 24)
        assert (n, k) == (problem.n, problem.k)
        at, problem = dict(zip(names, addresses, strict=True)), problem.at(m)
        found = {name: _placed(problem, name, at[name], rest, apart) for name in names}
        family = registry.get(Family, problem.family)
        exact = family.reference(problem, {name: t for name, t in found.items() if name != "c"})
        found["c"].copy_(exact.to(found["c"].dtype))


def _placed(problem: Problem, name: str, address: int, leads: tuple[int, ...], apart: tuple[int, ...]) -> Any:
    """An operand at an address, as families take it."""
    spec = problem.operands[name]
    if name not in "abc":
        flat = _memory(address, spec.dtype.torch, spec.count)
        return flat.view(*spec.extents) if spec.applied == "mainloop" else flat.view(*spec.lead, -1)
    if problem.batch > 1:
        lead, between = leads["abc".index(name)], apart["abc".index(name)]
        rows, columns = spec.shape if name != "b" else spec.shape[::-1]
        reach = (problem.batch - 1) * between + (rows - 1) * lead + columns
        entire = _memory(address, spec.dtype.torch, reach).as_strided(
            (problem.batch, rows, columns), (between, lead, 1)
        )
    else:
        shape = spec.shape if name != "b" else (*spec.shape[:-2], *spec.shape[:-3:-1])
        entire = _memory(address, spec.dtype.torch, prod(shape)).view(shape)
    return entire.mT if name == "b" else entire


def _memory(address: int, dtype: str, count: int) -> Any:
    import torch

    kind = getattr(torch, dtype)
    return torch.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), dtype=torch.uint8).view(
        kind
    )


def _pointed(signature: Mapping[str, str], given: Mapping[str, int]) -> Callable[[str, int], Any]:
    """Memory at a parameter, of `count` elements of its type."""
    torch_names = {f"*{d.triton}": d.torch for d in DTYPES.values()} | {
        "*i32": "int32",
        "*i64": "int64",
        "*u8": "uint8",
    }
    return lambda name, count: _memory(given[f"{name}_ptr"], torch_names[signature[f"{name}_ptr"]], count)


def _quantize(granularity: str) -> Callable[..., None]:
    def run(signature: Mapping[str, str], constants: Mapping[str, float], given: Mapping[str, int]) -> None:
        from tritongemm.operations.quantisation import by_torch

        at, m, k = _pointed(signature, given), given["M"], given["K"]
        q, factors = by_torch(at("x", m * k).view(m, k), granularity, at("q", 1).dtype, "rows")
        at("q", m * k).view(q.dtype).copy_(q.flatten())
        strides = given.get("row_stride", 1), given.get("group_stride", 1)
        reach = (m - 1) * strides[0] + (factors.shape[1] - 1) * strides[1] + 1
        at("scale", reach).as_strided(factors.shape, strides).copy_(factors)

    return run


def _sort(signature: Mapping[str, str], constants: Mapping[str, float], given: Mapping[str, int]) -> None:
    from tritongemm.operations import mixture_steps

    at, count = _pointed(signature, given), given["count"]
    order, place, ends = mixture_steps.sort(at("ids", count), given["experts"])
    for name, found in (("order", order), ("place", place), ("ends", ends)):
        at(name, found.numel()).copy_(found)


def _gather(signature: Mapping[str, str], constants: Mapping[str, float], given: Mapping[str, int]) -> None:
    from tritongemm.operations import mixture_steps

    at, rows, k, stride, topk = _pointed(signature, given), *(given[n] for n in ("rows", "K", "stride", "topk"))
    x = at("x", (rows // topk - 1) * stride + k).as_strided((rows // topk, k), (stride, 1))
    mode = ("", "row", "block")[int(constants["MODE"])]
    _put(at, mixture_steps.gather(x, at("order", rows), topk, mode, at("q", 1).dtype))


def _route(signature: Mapping[str, str], constants: Mapping[str, float], given: Mapping[str, int]) -> None:
    _sort(signature, constants, {**given, "count": given["rows"]})
    _gather(signature, constants, given)


def _activate(signature: Mapping[str, str], constants: Mapping[str, float], given: Mapping[str, int]) -> None:
    from tritongemm.operations import mixture_steps

    at, rows, k = _pointed(signature, given), given["rows"], given["K"]
    activation = ACTIVATIONS[int(constants["ACTIVATION"])]
    mode = ("", "row", "block")[int(constants["MODE"])]
    h, run = at("h", rows * 2 * k).view(rows, -1), int(constants["RUN"])
    _put(at, mixture_steps.activate(h, activation, mode, at("q", 1).dtype, run=run))


def _put(at: Callable[[str, int], Any], pair: tuple[Any, Any]) -> None:
    import torch

    q, scale = pair
    at("q", q.numel()).view(torch.uint8).copy_(q.contiguous().view(torch.uint8).flatten())
    if scale is not None:
        at("scale", scale.numel()).copy_((scale.mT if scale.dim() == 2 else scale).flatten())


def _combine(signature: Mapping[str, str], constants: Mapping[str, float], given: Mapping[str, int]) -> None:
    from tritongemm.operations import mixture_steps

    at, k, topk = _pointed(signature, given), given["K"], given["topk"]
    tokens = TOKENS
    y, place = at("y", tokens * topk * k).view(-1, k), at("place", tokens * topk)
    weights, ends = at("weights", tokens * topk).view(tokens, topk), at("ends", given["experts"])
    at("out", tokens * k).copy_(mixture_steps.combine(y, place, ends, weights, y.dtype).flatten())


HELPERS = {
    "quantize_rows": _quantize("row"),
    "quantize_groups": _quantize("block"),
    "sort_rows": _sort,
    "gather_rows": _gather,
    "route_rows": _route,
    "activate_rows": _activate,
    "combine_rows": _combine,
}
