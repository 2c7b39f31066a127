"""A model on the command line: its sizes printed, and what excludes each other."""

import json
from pathlib import Path

import pytest

from tests.support.model_configs import without_transformers  # noqa: F401
from tests.support.tables import each
from tritongemm.cli import options, tune

pytestmark = pytest.mark.usefixtures("without_gpu")

TINY = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "num_local_experts": 4, "torch_dtype": "bfloat16",
    "vocab_size": 100,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def test_sizes_are_printed_and_nothing_is_tuned(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model)
    argv = ["--model_dir", str(model), "--tp", "2", "--nsets", "4,32", "64", "--print_sizes"]
    assert tune.main(argv) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [row[1] for row in rows] == ["4", "32", "64"] * 4
    assert rows[0] == ["4x64x64_bf16_TN", "4", "64", "64", "3", "layers.*.self_attn.qkv_proj"]
    assert rows[-1][2:] == ["50", "64", "1", "lm_head"]
    assert "the 4 experts of 3 layers are grouped products, (N, K) = (96, 64) and (64, 48)" in err and "12 sizes" in err
    assert [path.name for path in model.iterdir()] == ["config.json"]


def test_its_sizes_are_tuned(model: Path) -> None:
    """All the way, up to the modules."""
    argv = ["--model_dir", str(model), "--nsets", "1", "--target", "gfx1100", "--generate_only", "--budget", "1"]
    assert tune.main([*argv, "-o", str(model / "out.yaml"), "--num_threads", "1"]) == 0
    assert len(list((model / "out_kernels").glob("generated_kernel_1_*.py"))) == 4


@each(
    ("argv", "complaint"),
    [
        (("--tp", "2"), "or a model with --model_dir"),
        (("-m", "1", "-n", "1", "-k", "1", "--tp", "2"), "--tp is for the sizes of a model: name its folder with"),
        (("-m", "1", "-n", "1", "-k", "1", "--all_bias"), "--all_bias is for the sizes of a model"),
        (("--model_dir", ".", "-m", "1"), "exclude each other; name values of M with --nsets"),
        (("--model_dir", ".", "--gemm_size_file", "x"), "exclude each other"),
        (("--model_dir", ".", "-col_a"), "a model defines the layouts and biases of its layers"),
        (("--model_dir", ".", "--bias_vector"), "a model defines the layouts and biases of its layers"),
        (("--model_dir", ".", "--tp", "0"), "--tp: '0' is not a whole number from 1 to 1024"),
        (("--model_dir", ".", "--nsets", "1,,2"), "--nsets: '' is not a whole number"),
        (("--model_dir", ".", "--nsets"), "--nsets: expected at least one argument"),
        (("--model_dir", ".", "--print_sizes", "--benchmark"), "--benchmark: not allowed with argument --print-sizes"),
    ],
)
def test_what_can_not_be_asked_for(argv: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        options.parse(argv)
    assert exit_.value.code == 2 and complaint in capsys.readouterr().err
