"""A server's model, once its weights are loaded: kernels are loaded then, and one line says what they serve of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from tritongemm.core.problem import Problem
from tritongemm.core.record import Record
from tritongemm.integrations import int4_layers, sglang_fp8, vllm_fp8, vllm_gates, vllm_moe
from tritongemm.integrations.compiled import serve_compiled_code
from tritongemm.integrations.process import LOG, attribute, factors_of_experts, is_in_blocks, lacks_hooks
from tritongemm.operations.served_problems import expert_weights, is_layer, is_scaled
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.served_w4 import OF_EXPERTS
from tritongemm.serving.source_row import baseline_won

_LAYERS = ("LinearBase", "ParallelLMHead")  # classes of both servers
_KERNELS = ("fp8_linear", "kernel", "linear_kernel")  # attributes of a method or a scheme: what multiplies
_PACKED_EXPERTS = ("w13_weight", "w13_weight_packed", "w13_qweight")  # weights that no row serves
_PLAIN = "Unquantized"  # what the names of methods without quantisation begin with


def prepare(model: nn.Module, compiled: bool, invariant: bool, gates: bool = False) -> None:
    """Load the kernels of a model's GPU, and log which layers are served.

    Args:
        model: the server's.
        compiled: whether the code that Inductor writes of it is served too.
        invariant: whether results must not depend on the batch.
        gates: whether gate and up may be computed with their activation, as vLLM's MLPs have them.
    """
    dispatcher = default_dispatcher()
    try:
        weight = next((w for w in model.parameters() if w.is_cuda), None)
        if weight is None:
            return
        dispatcher.want_invariant_rows(LOG, invariant)
        dispatcher.load_weights(model.parameters(), weight.get_device())
        if compiled:
            serve_compiled_code()
    except Exception as error:  # The server runs without us, whatever goes wrong here.
        dispatcher.withdraw()
        LOG.error("%s: %s; nothing is served by tuned kernels", type(error).__name__, error)
        return
    try:
        if gates and (count := vllm_gates.serve(model)):
            LOG.info("gate, up and activation of %d MLPs are one operation, by a kernel where a row says so", count)
        if not lacks_hooks():
            LOG.info("%s", describe(model, invariant))
    except Exception as error:  # Kernels are loaded: no more than the count of layers is lost.
        LOG.error("%s: %s; which layers are served can't be said", type(error).__name__, error)


def describe(model: nn.Module, invariant: bool = False) -> str:
    """Return how many linear layers and mixtures of experts have tuned kernels, and what computes the others."""
    why_not = partial(_look, invariant)
    found: dict[str, Counter[str]] = {"linear layers": Counter(), "mixtures of experts": Counter()}
    twice = 0
    for module in model.modules():
        if attribute(module, "quant_method") is None:
            continue
        if any(kind.__name__ in _LAYERS for kind in type(module).__mro__):
            left = attribute(module, int4_layers.LEFT)
            found["linear layers"][why_not(module, "weight", is_layer, _is_in_blocks) if left is None else left] += 1
            twice += sum(one.nbytes for name in int4_layers.KEPT if (one := attribute(module, name)) is not None)
        elif (other := attribute(module, int4_layers.LEFT)) is not None:
            found["mixtures of experts"][other] += 1
            twice += sum(one.nbytes for name in OF_EXPERTS if (one := attribute(module, name)) is not None)
        elif isinstance(attribute(module, "w13_weight"), Tensor):
            reasons = [why_not(module, name, _is_grouped, _is_grouped) for name in ("w13_weight", "w2_weight")]
            other = _mixture_is_of(module.quant_method)
            found["mixtures of experts"][f"of {other}" if other else max(reasons)] += 1
        elif any(attribute(module, name) is not None for name in _PACKED_EXPERTS):
            found["mixtures of experts"][f"of {_mixture_is_of(module.quant_method) or _computed_by(module)}"] += 1
    parts = [f"{reasons['']} of {reasons.total()} {kind}" for kind, reasons in found.items() if reasons]
    unserved = sum(found.values(), Counter[str]())
    del unserved[""]
    others = ", ".join(f"{count} {reason}" for reason, count in unserved.most_common())
    rest = f"; the server itself computes {others}" if others else ""
    rest += f"; weights of four bits are kept in the tables' order too, {twice / 2**20:.0f} MiB" if twice else ""
    return f"tuned kernels serve {' and '.join(parts) or 'no layer'} of {type(model).__name__}{rest}"


def _is_in_blocks(problem: Problem) -> bool:
    return is_scaled(problem) and bool(problem.scale_depth)


def _is_in_rows(problem: Problem) -> bool:
    return is_scaled(problem) and not problem.scale_depth


def _is_grouped(problem: Problem) -> bool:
    return expert_weights(problem) is not None


def _look(invariant: bool, layer: Any, *what: Any) -> str:
    """Return what `_why_not` does; a layer that it can't read costs the others nothing."""
    try:
        return _why_not(invariant, layer, *what)
    except Exception as error:
        return f"that can't be read ({type(layer).__name__}: {error})"


def _why_not(
    invariant: bool, layer: Any, name: str, is_plain: Callable[[Problem], bool], is_quantised: Callable[[Problem], bool]
) -> str:
    """Return why a layer's weight is not served, behind the number of such layers; "" where it is.

    Args:
        invariant: whether results must not depend on the batch.
        layer: the layer.
        name: of its weight.
        is_plain: whether a problem is such a layer's without quantisation.
        is_quantised: whether it is one's in fp8.
    """
    weight, plain = attribute(layer, name), type(layer.quant_method).__name__.startswith(_PLAIN)
    in_rows_of_vllm = _computed_by(layer) == vllm_fp8.ROWS_KERNEL
    of_sglang = type(layer.quant_method).__module__.startswith("sglang.")
    is_in_rows = in_rows_of_vllm or (of_sglang and sglang_fp8.has_factors_of_rows(layer))
    if not isinstance(weight, Tensor) or not (plain or is_in_rows or _has_factors(layer, name)):
        return f"of {_computed_by(layer)}"
    shape, is_of = tuple(weight.shape), is_plain if plain else is_quantised
    if is_in_rows:  # Both servers hold these weights transposed.
        shape, is_of = shape[::-1], _is_in_rows
    if invariant and (*shape, not plain) not in default_dispatcher().invariant_weights:
        return "without a row that states its order of additions"

    def holds(record: Record) -> bool:
        p = record.problem
        groups = (p.group_count,) if len(shape) == 3 else ()
        return (*groups, p.n, p.k) == shape and is_of(p) and not baseline_won(record)

    return default_dispatcher().why_layer_is_idle(holds, weight.get_device())


def _has_factors(layer: Any, name: str) -> bool:
    scales = (attribute(layer, f"{name}_{kind}") for kind in ("scale_inv", "scale"))
    scale = next((one for one in scales if isinstance(one, Tensor)), None)
    weight = attribute(layer, name)
    in_rows = weight.dim() == 3 and factors_of_experts(weight, scale, in_rows=True) is not None
    return scale is not None and (in_rows or is_in_blocks(weight, scale))


def _mixture_is_of(method: Any) -> str:
    """Return what computes a method's mixtures where that is not served; "" where it is, or is not said."""
    experts = attribute(attribute(method, "moe_kernel"), "fused_experts")  # vLLM's
    if experts is not None and type(experts).__name__ not in vllm_moe.EXPERTS:
        return type(experts).__name__
    backend = attribute(attribute(method, "runner"), "runner_backend")  # SGLang's
    return "" if backend is None or backend.is_triton() else str(backend.value)


def _computed_by(layer: Any) -> str:
    """Return the class of a layer's kernel, or else of its method."""
    for owner in (layer.quant_method, attribute(layer, "scheme")):
        for name in _KERNELS:
            kernel = attribute(owner, name)
            if kernel is not None and not callable(kernel):
                return type(kernel).__name__
    return type(layer.quant_method).__name__
