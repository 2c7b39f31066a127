"""Triton's front end without repeated work: what is remembered, and that other versions are left as they are."""

import inspect
import warnings
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest

from tritongemm.backends.triton import front_end
from tritongemm.backends.triton.compiling import multiply_tile


def test_a_function_is_parsed_once_and_its_signature_derived_once() -> None:
    from triton.compiler import code_generator

    with front_end.quick_front_end():
        first = multiply_tile.parse()
        assert multiply_tile.parse() is first
        name = code_generator.inspect.signature(str.join)
        assert code_generator.inspect.signature(str.join) is name


def test_a_method_has_another_signature_than_its_function() -> None:
    class Tensor:
        def to(self, dtype: str, _semantic: object = None) -> None:
            """As a builtin of Triton's tensors."""

    signature_of = front_end._remember_signatures(inspect.signature)
    for each in (Tensor.to, Tensor().to, Tensor().to, Tensor.to):
        assert signature_of(each) == inspect.signature(each)


def test_warnings_that_the_front_end_ignores_are_ignored_and_no_others() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with front_end.quick_front_end():
            warnings.warn("an old node", DeprecationWarning, stacklevel=1)
            with pytest.raises(UserWarning):
                warnings.warn("a kernel's own", UserWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning):
            warnings.warn("an old node", DeprecationWarning, stacklevel=1)


def test_a_version_without_the_name_is_left_as_it_is() -> None:
    module = ModuleType("later")
    front_end._replace(module, "ast", parse=lru_cache(1))
    assert not hasattr(module, "ast")


def test_a_kernel_is_the_same_without_locations_and_others_keep_theirs(tmp_path: Path) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32", "k": "i32", "BLOCK": "constexpr"}

    def compiled(what: str, with_lines: bool) -> str:
        triton.knobs.compilation.disable_line_info = not with_lines
        source = ASTSource(multiply_tile, types, {"BLOCK": 32})
        found: str = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm[what]
        return found

    lines, first = inspect.getsourcelines(multiply_tile.fn)
    product = f'compiling.py":{first + next(i for i, line in enumerate(lines) if "tl.dot" in line)}:'
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(tmp_path)
        triton.knobs.compilation.always_compile = True
        plain = compiled("ptx", with_lines=False)
        assert product in compiled("ttir", with_lines=True)
        with front_end.quick_front_end():
            assert compiled("ptx", with_lines=False) == plain
            assert product not in compiled("ttir", with_lines=True)
        assert product in compiled("ttir", with_lines=True)


def test_a_fault_in_a_kernel_names_its_line() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(multiply_tile, {"a_ptr": "*fp16", "b_ptr": "*i32", "c_ptr": "*fp32", "k": "i32"}, {"BLOCK": 32})
    with pytest.raises(triton.CompilationError, match=r"total = tl\.dot"), front_end.quick_front_end():
        triton.compile(source, target=GPUTarget("cuda", 90, 32))


def test_a_tuple_type_is_named_when_it_is_asked_for() -> None:
    """As the version that names it at once would."""

    class AtOnce:
        def __init__(self, types: list[str], fields: list[str] | None = None) -> None:
            self.types, self.fields = types, fields or [""] * len(types)
            self.name = "made at once"

    module = ModuleType("core")
    module.tuple_type = AtOnce  # type: ignore[attr-defined]
    front_end._name_tuples_when_asked(module)
    assert [AtOnce(["i32", "fp8"]).name, AtOnce(["i32"], ["x"]).name] == ["[:i32,:fp8]", "[x:i32]"]
    front_end._name_tuples_when_asked(module)  # it is as later versions have it now
    assert AtOnce(["i1"]).name == "[:i1]"
