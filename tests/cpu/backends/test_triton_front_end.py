"""Triton's front end without repeated work: what is remembered, and that other versions are left as they are."""

from __future__ import annotations

import inspect
import warnings
from functools import lru_cache
from types import ModuleType

import pytest

from tritongemm.backends.triton import front_end
from tritongemm.backends.triton.warm_up import multiply_tile


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
