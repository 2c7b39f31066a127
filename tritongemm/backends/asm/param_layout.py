"""Parameter blocks of assembly kernels: the offset of each value, declared by name or read from the code object.

AITER's blocks are packed structs whose every field takes 16 bytes. A kernel may read only a prefix: fields were
appended to the same struct over the years, and the code object's metadata says how much of it a kernel reads.

Source: ROCm/aiter csrc/py_itfs_cu/asm_gemm_*.cu (MIT).
"""

from dataclasses import dataclass

from tritongemm.core.errors import InputError
from tritongemm.hip_ext.binaries.code_object import KernelInfo

SLOT = 16
# Fields that are addresses; all others are 32-bit numbers. `null` is an address that is never read.
POINTERS = frozenset(
    ("a", "b", "c", "c_in", "bias", "scale_a", "scale_b", "workspace", "semaphore", "null")
)  # fmt: skip
FLOATS = frozenset(("alpha", "beta"))
NUMBERS = frozenset(
    ("m", "n", "k", "lda", "ldb", "ldc", "stride_c0", "stride_c1", "stride_c_in0", "stride_c_in1", "stride_a0",
     "stride_a1", "stride_b0", "stride_b1", "group_m", "split_k", "log2_split_k", "c_is_bf16", "add_bias", "scale_m",
     "scale_n", "scale_k", "stride_scale_a0", "stride_scale_a1", "stride_scale_b0", "stride_scale_b1")
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A declared parameter block."""

    name: str  # as manifests spell it
    fields: tuple[str, ...]  # in order, 16 bytes each
    lengths: tuple[int, ...]  # how many of them a kernel may read
    prefixes: tuple[str, ...]  # what symbols of such kernels begin with, mangling and case aside


_OPERANDS: tuple[str, ...] = (
    "c",
    "c_in",
    "a",
    "b",
    "alpha",
    "beta",
    "stride_c0",
    "stride_c1",
    "stride_c_in0",
    "stride_c_in1",
)
_OPERANDS += ("stride_a0", "stride_a1", "stride_b0", "stride_b1", "m", "n", "k")
_SCALED = ("c", "a", "b", "scale_a", "scale_b", "bias", "m", "n", "k", "lda", "ldb", "ldc", "split_k")

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            "bf16",
            (*_OPERANDS, "split_k", "c_is_bf16", "bias", "add_bias", "semaphore"),
            (18, 21, 22),
            ("bf16gemm",),
        ),
        Layout(
            "fp4",
            (*_OPERANDS, "scale_a", "scale_b", "stride_scale_a0", "stride_scale_a1", "stride_scale_b0",
             "stride_scale_b1", "log2_split_k"),
            (23, 24),
            ("f4gemm",),
        ),
        Layout("i8", _SCALED, (13,), ("i8gemm",)),
        Layout("fp8_blockscale", (*_SCALED, "scale_m", "scale_n", "scale_k"), (16,), ("fp8gemm",)),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Field:
    """A parameter of a kernel: its name, one of those above, and its offset in bytes."""

    name: str
    offset: int

    @property
    def kind(self) -> str:
        """``pointer``, ``f32`` or ``u32``."""
        return "pointer" if self.name in POINTERS else "f32" if self.name in FLOATS else "u32"


def declared(text: str, symbol: str) -> Layout | tuple[str, ...]:
    """Return a kernel's declared layout, or its parameters' names in order; an InputError lists known ones."""
    if " " in text:
        names = tuple(text.lower().split())
        unknown = [n for n in names if n not in POINTERS | FLOATS | NUMBERS]
        if unknown:
            known = ", ".join(sorted(POINTERS | FLOATS | NUMBERS))
            raise InputError(f"{symbol}: no parameter is called {', '.join(unknown)}; known: {known}")
        return names
    if text:
        if text not in LAYOUTS:
            raise InputError(
                f"{symbol}: no layout is called {text!r}; there are: {', '.join(LAYOUTS)}, or name the parameters"
            )
        return LAYOUTS[text]
    plain = symbol.lower().lstrip("_").removeprefix("zn5aiter").lstrip("0123456789")
    for layout in LAYOUTS.values():
        if plain.startswith(layout.prefixes):
            return layout
    raise InputError(
        f"{symbol}: the layout of its parameters is not known; the manifest needs a column layout with one of "
        f"{', '.join(LAYOUTS)}, or the parameters in order"
    )


def fields(layout: Layout | tuple[str, ...], kernel: KernelInfo) -> tuple[Field, ...]:
    """Return the parameters with their offsets; an InputError where sizes or kinds differ from the code object's."""
    own = kernel.explicit_args
    if isinstance(layout, Layout):
        if kernel.kernarg_bytes not in [SLOT * n for n in layout.lengths]:
            sizes = " or ".join(str(SLOT * n) for n in layout.lengths)
            raise InputError(
                f"{kernel.symbol}: takes {kernel.kernarg_bytes} bytes of parameters, layout {layout.name} has {sizes}"
            )
        count = kernel.kernarg_bytes // SLOT
        found = tuple(Field(name, SLOT * i) for i, name in enumerate(layout.fields[:count]))
    else:
        if len(own) != len(layout):
            raise InputError(f"{kernel.symbol}: takes {len(own)} parameters, its manifest names {len(layout)}")
        found = tuple(Field(name, argument.offset) for name, argument in zip(layout, own, strict=True))
    at = {a.offset: a for a in own}
    for one in found:
        argument = at.get(one.offset)
        pointer = one.kind == "pointer"
        if own and (argument is None or argument.size != (8 if pointer else 4)):
            here = f"{argument.size} bytes" if argument else "none"
            raise InputError(f"{kernel.symbol}: parameter {one.name} at byte {one.offset} is {here} in the code object")
        if argument is not None and argument.kind and (argument.kind == "pointer") != pointer:
            raise InputError(
                f"{kernel.symbol}: parameter {one.name} at byte {one.offset} is a {argument.kind} in the code object"
            )
    return found
