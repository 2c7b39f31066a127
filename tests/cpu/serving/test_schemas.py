"""The operations that graphs and exported programs name: their schemas are a promise, and stand here as they are."""

from __future__ import annotations

import pytest
import torch

import tritongemm

SCHEMAS = {
    "mm": "Tensor x, Tensor w, Tensor? bias=None, ScalarType? out_dtype=None",
    "bmm": "Tensor a, Tensor b, Tensor? bias=None, ScalarType? out_dtype=None, Tensor? scale_a=None, "
    'Tensor? scale_b=None, str scale_layout=""',
    "scaled_mm": "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, ScalarType out_dtype=15, "
    'str order_b="plain", str scale_layout=""',
    "grouped_mm": "Tensor a, Tensor b, Tensor offs, Tensor? scale_a, Tensor? scale_b, ScalarType out_dtype, "
    'str scale_layout=""',
    "fused_moe": "Tensor x, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, str activation, "
    'Tensor? w1_scale, Tensor? w2_scale, str scale_layout=""',
    "linear_fp8": "Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype, "
    "Tensor? unquantized=None",
    "quantize": "Tensor x, str granularity, ScalarType dtype, str layout",
}
WITHOUT_GRADIENTS = ("mm", "quantize")  # their gradients are those of PyTorch's own operations, or there are none


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_stay(name: str) -> None:
    public = {"bmm": tritongemm.scaled_bmm}.get(name) or getattr(tritongemm, name)  # which defines the operation
    result = "(Tensor, Tensor)" if name == "quantize" else "Tensor"
    expected = {name: f"({SCHEMAS[name]}) -> {result}"}
    if name not in WITHOUT_GRADIENTS:
        expected[f"{name}_with_gradients"] = expected[name]
        expected[f"{name}_gradients"] = f"(Tensor gradient, bool[] wanted, {SCHEMAS[name]}) -> Tensor[]"
    registered = {operation: getattr(torch.ops.tritongemm, operation).default._schema for operation in expected}
    assert callable(public)
    assert {operation: str(schema) for operation, schema in registered.items()} == {
        operation: f"tritongemm::{operation}{schema}" for operation, schema in expected.items()
    }
