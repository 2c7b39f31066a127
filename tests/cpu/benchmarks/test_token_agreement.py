"""benchmarks/token_agreement.py: an order of additions alone moves tokens of an fp8 model far, those of bf16 little."""

import importlib

import pytest


def test_fp8_is_moved_further(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("token_agreement").main(["--hidden", "128", "--layers", "8", "--tokens", "32"])
    bf16, fp8 = (float(line.split("by up to ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines())
    assert 0 < 3 * bf16 < fp8
