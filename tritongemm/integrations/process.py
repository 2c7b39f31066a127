"""Starts serving in each process of a server, whichever server it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial, wraps
from inspect import signature
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor

from tritongemm.core.errors import TritonGemmError
from tritongemm.core.integers import cdiv
from tritongemm.core.scaling import SCALED_BLOCK
from tritongemm.serving import dispatcher, server_calls
from tritongemm.serving.calls import keep
from tritongemm.serving.dispatcher import default_dispatcher
from tritongemm.serving.tuned_calls import TunedCalls
from tritongemm.system import settings

LOG = logging.getLogger("tritongemm")
Found = TypeVar("Found")
Read: TypeAlias = "Callable[..., Callable[[], Any] | None]"

EVERY_LAYER: Final = "layer"
_MOVED: Final = "this %s is not as the plug-in knows it (%s); tuned kernels serve no %s"
_UNREADABLE: Final = "%s: this %s is not as the plug-in knows it (%s); it is computed as without tuned kernels"
_HOOKED: Final = "tritongemm_hook"  # attribute of a function that stands before a server's
_REASONS: Final = 8  # that are logged, as one may name the sizes of a call
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class _Asked:
    """What the process was started for; a tracer reads it too, which can't read the environment."""

    captures = False
    lacks_hooks = False


def start_serving(server: str) -> str:
    """Read the tables that TRITONGEMM_CONFIG names, without starting the GPU, which this process may never use.

    Kernels are loaded when the model is there; a line that says what they serve is logged then. A file that can't
    be read is logged as an error, and the server computes as it did without us.

    Args:
        server: the name of its logger, to which our lines go, as it may set up no other.

    Returns:
        What distinguishes the tables from others; "" where nothing is to be served.
    """
    _Asked.captures = bool(settings.capture_files())
    if settings.tuned_configs() or _Asked.captures:
        LOG.parent = logging.getLogger(server)
        LOG.setLevel(logging.NOTSET)  # Messages have the server's level.
    try:
        settings.free_share()  # which is read when weights are
        return default_dispatcher().add_configured() if settings.tuned_configs() else ""
    except TritonGemmError as error:
        LOG.error("%s; nothing is served by tuned kernels", error)
        return ""


class Refusal(Exception):
    """Why a server is left as it is."""


def install(server: str, hooks: Mapping[str, Callable[[], None]]) -> None:
    """Install hooks into a server. One whose place is not there is left out, and an error says what is not served.

    Args:
        server: its name.
        hooks: what installs them, by what they serve. The others need that of `EVERY_LAYER`.
    """
    moved: dict[str, list[str]] = {}
    for served, hook in hooks.items():
        try:
            hook()
        except Refusal as reason:
            LOG.warning("%s; nothing is served by tuned kernels", reason)
            return
        except (AttributeError, ImportError, LookupError) as error:
            moved.setdefault(str(error), []).append(served)
            if served == EVERY_LAYER:
                break
    _Asked.lacks_hooks = bool(moved)
    for why, names in moved.items():
        LOG.error(_MOVED, server, why, ", ".join(names))


def require_parameters(function: Callable[..., Any], read: Callable[..., Any]) -> None:
    """Refuse a server's function whose parameters, but for the first, have other names than those that `read` has.

    One that takes any parameters looks at them itself; the first two of the others are none but of the hook.

    Raises:
        AttributeError: names them.
    """
    theirs, ours = ([*signature(one).parameters.values()] for one in (function, read))
    if any(one.kind is one.VAR_POSITIONAL for one in ours):
        return
    found, known = [one.name for one in theirs[1:]], [one.name for one in ours[2:]]
    if found != known:
        raise AttributeError(f"{function.__qualname__} takes {', '.join(found)}, not {', '.join(known)}")


def guarded(server: str, served: str, read: Callable[..., Found | None]) -> Callable[..., Found | None]:
    """Return a function that reads a server's layer or call; None for one that is not as `read` knows it.

    Others are read as before. An error says, once for each reason, what is not served, and why.
    """
    said: set[str] = set()

    def read_known(*given: Any, **named: Any) -> Found | None:
        try:
            return read(*given, **named)
        except Exception as error:  # The server runs without us, whatever its objects are.
            if torch.compiler.is_compiling():  # a tracer can write no line
                return None
            why = f"{type(error).__name__}: {error}"
            if why not in said and len(said) < _REASONS:
                said.add(why)
                LOG.error(_UNREADABLE, server, served, why)
            return None

    return read_known


def make_hook(server: str, served: str, read: Read) -> Callable[..., Any]:
    """Return ``hook(function, its arguments)``: `read` says what computes a call before a server's function does.

    Args:
        server: its name.
        served: the kind of layer.
        read: is given the call as the server computes it, then its arguments, and returns what computes it instead;
            None where the server does. What it can't read costs no other layer or call, as `guarded` says.
    """
    known = guarded(server, served, read)

    @wraps(read)
    def hook(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        own = partial(original, *given, **named)
        compute = known(own, *given, **named)
        return own() if compute is None else compute()

    return hook


def make_layer_hook(
    server: str, served: str, read: Read, holds: str = "", serve: Callable[..., Any] = lambda *given, **named: None
) -> Callable[..., Any]:
    """Return ``hook(function, method, layer, x, …)``, which asks `read` once about what the server computes itself.

    A call of the same layer and shape is then not looked at again until rows are added: an eager prefill has hundreds,
    and each function of Python that it calls costs the host a microsecond or two. What is found while gradients are
    wanted or a graph is captured is not kept, and every call is looked at while calls are counted.

    Args:
        server: its name.
        served: the kind of layer.
        read: as of `make_hook`; its third and fourth arguments are the layer and x.
        holds: the attribute of x and of the result that is a tensor; "" where they are tensors themselves.
        serve: returns a call's result by a kernel that it knows; False if it knows that there is none; or None.
    """
    hook = make_hook(server, served, read)
    of_layer, of_x = [*signature(read).parameters][2:4]

    @wraps(read)
    def ask_once(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or server_calls.product_or is not server_calls.UNCOUNTED:  # it counts
            return hook(original, *given, **named)
        layer = given[1] if len(given) > 1 else named.get(of_layer)
        x = given[2] if len(given) > 2 else named.get(of_x)
        held = attribute(x, holds) if holds and isinstance(layer, torch.nn.Module) else x
        if not isinstance(layer, torch.nn.Module) or not isinstance(held, Tensor):
            return hook(original, *given, **named)
        # A layer in the place of one that is gone is computed as that was, which costs its kernel at most.
        key, declined = (id(layer), held.shape, held.dtype, held.is_contiguous()), dispatcher.default.calls.declined
        if key in declined:
            return original(*given, **named)
        try:
            result = serve(*given, **named)
        except Exception:  # No error ends a server: `read` is asked, and says what it is.
            result = None
        if result is not None and result is not False:
            return result
        computed: list[Any] = []

        def compute(*changed: Any, **rest: Any) -> Any:
            computed[:] = [original(*changed, **rest)]
            return computed[0]

        result = compute(*given, **named) if result is False else hook(compute, *given, **named)
        of_both = [attribute(one, holds) if holds else one for one in (result, *computed)]
        if len({*map(id, of_both)}) < len(of_both) and not may_change(held):
            keep(declined, key, None)
        return result

    return ask_once


def may_change(x: Tensor) -> bool:
    """Return whether a call of the same layer and shape may be decided otherwise a moment later."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled() or torch._C._len_torch_dispatch_stack():
        return True
    return not x.is_cuda or torch.cuda.is_current_stream_capturing()


def replace(server: str, served: str, places: Mapping[Any, str], read: Read) -> None:
    """Put a hook before a server's function, as `make_hook`, in each of its places: owners and the name that it has.

    Raises:
        AttributeError: it is not there, or has other parameters.
    """
    hook = make_hook(server, served, read)
    (original,) = {getattr(owner, name) for owner, name in places.items()}
    require_parameters(original, read)

    @wraps(original)
    def serve(*given: Any, **named: Any) -> Any:
        return hook(original, *given, **named)

    setattr(serve, _HOOKED, True)
    for owner, name in places.items():
        setattr(owner, name, serve)


def is_hooked(function: Any) -> bool:
    """Return whether a server's function has a hook of ours before it."""
    return bool(attribute(function, _HOOKED))


def find_linear(
    calls: TunedCalls, traced: Callable[..., Tensor] | None, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Callable[[], Tensor] | None:
    """Return what computes a plain layer's call by a tuned kernel; None where the server does.

    Args:
        calls: of the server's function.
        traced: what torch.compile traces; None for the server's function.
        x: activations.
        weight: the layer's, as the server has it.
        bias: the layer's, or None.
    """
    weight, bias = plain(weight), plain(bias)
    if not x.is_cuda or not serves_weight(weight):
        return None
    if torch.compiler.is_compiling():
        return partial(traced, x, weight, bias) if traced else None
    call = calls.find(x, weight, bias)
    return None if call is None else partial(call, x, weight, bias, None)


def attribute(owner: Any, name: str, default: Any = None) -> Any:
    """Return an attribute of a server's object, which some versions or kinds of it lack."""
    return getattr(owner, name, default)


def captures() -> bool:
    """Return whether this process was started to write what the server multiplies to a file."""
    return _Asked.captures


def lacks_hooks() -> bool:
    """Return whether a place of the server is not as its plug-in knows it, so that layers with rows are not served."""
    return _Asked.lacks_hooks


def plain(value: Any) -> Any:
    """Return a parameter of a server's own class as a tensor of PyTorch's, and everything else as it is.

    Each attribute of such a parameter is a call of Python, and tuned kernels take plain tensors alone. What is traced
    stays as it is.
    """
    kind = type(value)
    if kind is torch.nn.Parameter or not issubclass(kind, torch.nn.Parameter) or torch.compiler.is_compiling():
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def serves_scales(invariant: bool = False) -> bool:
    """Return whether products with scales are looked at: by rows, of stated order if invariant, or by a capture."""
    dispatcher = default_dispatcher()
    rows = any(scaled for *_, scaled in dispatcher.invariant_weights) if invariant else dispatcher.scaled_weights
    return bool(rows) or (captures() and not invariant)


def serves_experts() -> bool:
    """Return whether mixtures of experts are looked at: by rows, or by a capture."""
    return captures() or bool(default_dispatcher().expert_weights)


def serves_gates() -> bool:
    """Return whether rows compute gate and up with their activation."""
    return bool(default_dispatcher().gated_weights)


def serves_four_bits() -> bool:
    """Return whether weights of four bits are looked at: by rows, or by a capture."""
    return captures() or bool(default_dispatcher().packed_weights)


def serves_weight(w: Tensor) -> bool:
    """Return whether a record of a linear layer has a weight's N and K."""
    return w.dim() == 2 and (w.shape[0], w.shape[1]) in default_dispatcher().layer_weights


def serves_invariantly(w: Tensor, wanted: bool) -> bool:
    """Return whether a layer may be served as the server computes now: where the batch must not matter, by its order.

    Args:
        w: the layer's weight.
        wanted: whether a row of the result must have the same bits at every M.
    """
    if not torch.compiler.is_compiling():  # a traced function can note nothing: the model's loading did
        default_dispatcher().want_invariant_rows(LOG, wanted)
    return not wanted or (w.dim() == 2 and (w.shape[0], w.shape[1], False) in default_dispatcher().invariant_weights)


def serves_scaled(n: int, k: int, invariant: bool = False) -> bool:
    """Return whether a record with scales has a weight's N and K, or a capture counts the products of every weight.

    Args:
        n: rows of the weight.
        k: its columns.
        invariant: whether a row must have the same bits at every M: the record must state its order then.
    """
    if invariant:
        return (n, k, True) in default_dispatcher().invariant_weights
    return captures() or (n, k) in default_dispatcher().scaled_weights


def serves_blocks(w: Tensor, scale: Tensor, invariant: bool = False) -> bool:
    """Return the same of a weight in fp8, whose factors are float32 for 128 x 128 of it."""
    return w.dim() == 2 and serves_scaled(w.shape[0], w.shape[1], invariant) and is_in_blocks(w, scale)


def is_in_blocks(w: Tensor, scale: Tensor) -> bool:
    """Return whether weights [..., N, K] are fp8 with float32 factors for 128 x 128 of them."""
    blocks = (*w.shape[:-2], cdiv(w.shape[-2], SCALED_BLOCK), cdiv(w.shape[-1], SCALED_BLOCK))
    return w.dtype in _FP8 and scale.dtype == torch.float32 and tuple(scale.shape) == blocks


def factors_of_experts(w: Tensor, scale: Tensor | None, in_rows: bool) -> Tensor | None:
    """Return the factors of experts' fp8 weights as `fused_moe` takes them; None where they are of another kind.

    Args:
        w: [experts, N, K].
        scale: the server's factors.
        in_rows: whether there is one for each row, [experts, N, 1], rather than for 128 x 128.
    """
    if scale is None:
        return None
    if not in_rows:
        return scale if is_in_blocks(w, scale) else None
    known = w.dtype in _FP8 and scale.dtype == torch.float32 and tuple(scale.shape) == (*w.shape[:-1], 1)
    return scale.squeeze(-1) if known else None


_libraries: dict[str, torch.library.Library] = {}  # of each operation, which exists as long


def define_opaque(name: str, schema: str, compute: Callable[..., Tensor], infer: Callable[..., Tensor]) -> Any:
    """Return the operation ``tritongemm::name``, in the place of a former one. torch.compile does not look inside.

    Args:
        name: of the operation.
        schema: its arguments and result, as torch.library writes them.
        compute: what it does with tensors of a GPU or a CPU.
        infer: its result for tensors without contents.
    """
    if name in _libraries:
        _libraries.pop(name)._destroy()
    exact = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    library = _libraries[name] = torch.library.Library("tritongemm", "FRAGMENT")
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, exact))

    def compute_plain(*given: Any) -> Tensor:
        return compute(*map(plain, given))

    for key in ("CUDA", "CPU"):
        library.impl(name, compute_plain, key)
    torch.library.register_fake(f"tritongemm::{name}", infer, lib=library)
    return getattr(torch.ops.tritongemm, name)


def define_linear(name: str, calls: TunedCalls) -> Any:
    """Return an operation of x [..., K], w [N, K] and a bias [N] or None, which looks M up in its body."""

    def compute(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return calls(x, w, bias).contiguous()

    def infer(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.new_empty((*x.shape[:-1], w.shape[0]))

    return define_opaque(name, "(Tensor x, Tensor w, Tensor? bias=None) -> Tensor", compute, infer)
