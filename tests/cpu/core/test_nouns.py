import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.nouns import Artifact, Config, InputError, Record, TargetError, TritonGemmError, each, fails, refuses
from tests.support.nouns import loader as target_files
from tritongemm.core.dtypes import ALIASES, BY_ENCODING, DTYPES, dtype
from tritongemm.core.problem import MAX_DIM, Operand, Problem, matrices
from tritongemm.core.scaling import GRANULARITIES
from tritongemm.core.trial import STAGES, STATUSES, Trial

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDENTIFIERS = st.from_regex(r"[a-z]+(_[a-z0-9]*[a-z])*", fullmatch=True)
OPTIONS = st.dictionaries(st.from_regex(r"[a-z]+(_[a-z]+)*", fullmatch=True), st.integers(0, 10**6), max_size=4)
SECONDS = st.floats(1e-9, 1e3)
CONFIGS = st.builds(
    Config, template=IDENTIFIERS, block_m=st.integers(0, 512), block_n=st.integers(0, 512),
    block_k=st.integers(0, 2048), group_m=st.integers(0, 64), split_k=st.integers(0, 64),
    num_warps=st.integers(0, 32), num_stages=st.integers(0, 9), options=OPTIONS.map(lambda d: tuple(d.items())),
    backend=st.sampled_from(["triton", "torch", "blaslt", "asm"]),
)  # fmt: skip
SIZES = st.integers(1, MAX_DIM)
NAMES = st.sampled_from(sorted(DTYPES))
PROBLEMS = st.builds(
    Problem, *[SIZES] * 3, *[st.tuples(NAMES, st.booleans()).map(lambda said: Operand(*said))] * 2,
    NAMES.map(Operand), st.sampled_from(["none", "m", "n"]), SIZES,
)  # fmt: skip


def trials(statuses: tuple[str, ...], stages: tuple[str, ...], least: int, most: int) -> st.SearchStrategy[Trial]:
    return st.builds(
        Trial, config=CONFIGS, status=st.sampled_from(statuses), reason=WORDS,
        samples=st.lists(SECONDS, min_size=least, max_size=most).map(tuple), timer=WORDS,
        stage=st.sampled_from(stages), error=st.none() | st.floats(0, math.inf),
        tolerance=st.none() | st.floats(0, 1),
    )  # fmt: skip


# Where nothing is timed, a config that is right has no samples.
TRIALS = trials(("ok",), STAGES, 1, 5) | trials(("ok",), ("final",), 0, 0) | trials(STATUSES[1:], STAGES, 0, 0)
BUILTS = st.builds(
    Artifact, config=CONFIGS, digest=WORDS, path=WORDS, symbol=WORDS, registers=st.integers(0, 512),
    seconds=SECONDS, status=st.sampled_from(["ok", "compile_failed", "out_of_resources", "timeout"]),
    launch=st.dictionaries(WORDS, st.integers() | WORDS | st.lists(st.integers()), max_size=3),
)  # fmt: skip
RECORDS = st.builds(
    Record, problem=PROBLEMS, target=WORDS, config=CONFIGS, winner=WORDS, seconds=SECONDS, spread=SECONDS,
    timer=WORDS, error=st.none() | st.floats(0, math.inf), library_seconds=st.none() | SECONDS, tie=st.booleans(),
    toolchain=st.dictionaries(WORDS, WORDS, max_size=3), cold=st.booleans(),
)  # fmt: skip


@given(st.one_of(PROBLEMS, TRIALS, BUILTS, RECORDS))
def test_json_round_trip(noun: Any) -> None:
    assert type(noun).from_json(json.loads(json.dumps(noun.to_json()))) == noun


@given(CONFIGS)
def test_a_config_is_read_from_its_name(config: Config) -> None:
    assert Config.parse(config.name) == config


def test_names_of_configs_and_dtypes() -> None:
    config = Config("tile", 64, 32, 16, 8, 2, 4, 3, (("waves_per_eu", 0), ("kpack", 2)))
    assert config.name == "tile__bm64__bn32__bk16__gm8__sk2__w4__s3__kpack2__waves_per_eu0"
    assert config.name.isidentifier(), "it names the kernel in a profiler's trace"
    assert config == Config("tile", 64, 32, 16, 8, 2, 4, 3, (("kpack", 2), ("waves_per_eu", 0))), "options are sorted"
    assert (config.option("kpack"), config.option("absent", 7), config.tile) == (2, 7, (64, 32, 16))
    assert Config("addmm", 0, 0, 0, backend="torch").name.startswith("torch.addmm__")
    # A winner of ours that was exported as an assembly kernel is a template there.
    outer = Config(Config("tma", 16, 64, 256, 8, options=(("swap_ab", 1),)).name, 32, 32, 32, backend="asm")
    assert Config.parse(outer.name) == outer and {dtype(n).name for n in DTYPES} == set(DTYPES)
    for alias, name in ALIASES.items():
        assert dtype(alias).name == dtype(f"torch.{alias}").name == dtype(alias.upper()).name == name
    for open_name, meanings in BY_ENCODING.items():
        for encoding, name in meanings.items():
            assert dtype(open_name, encoding).name == name
    refuses(r"unknown dtype 'fp7'; there are: fp16, .*bf8", dtype, "fp7")


@each("bad", [0, -1, MAX_DIM + 1, True, 16.0, "16", None])
@each("field", ["m", "n", "k", "batch"])
def test_a_problem_refuses_its_sizes_by_name(field: str, bad: Any) -> None:
    refuses(f"^{field.upper()} must be .* not {bad!r}$", Problem, **{"m": 1, "n": 1, "k": 1, field: bad})


def test_a_problem_refuses_dtypes_and_biases_and_says_what_it_amounts_to() -> None:
    refuses(r"dtype_b is 'fp7'; known dtypes: fp16, bf16", Problem, 1, 1, 1, *matrices(b="fp7"))
    refuses("bias must be one of none, m, n, not 'k'", Problem, 1, 1, 1, bias="k")
    problem = Problem(3, 5, 7, *matrices(b="fp8e5m2", c="fp32", layout="NT"), bias="n", batch=2)
    assert problem.flops == 2 * 2 * 3 * 5 * 7 and problem.bytes == 2 * (3 * 7 * 2 + 7 * 5 * 1 + 3 * 5 * 4 + 5 * 4)
    assert problem.layout == "NT" and problem.key == "3x5x7_fp16-fp8e5m2-fp32_NT_biasn_batch2"
    assert Problem(1, 1, 1, *matrices("int8")).bias_dtype.name == "int32"
    assert Problem(1, 1, 1, *matrices(c="fp8e5m2")).bias_dtype.name == "fp16"


@given(PROBLEMS, PROBLEMS)
def test_keys_are_identities(one: Problem, other: Problem) -> None:
    assert (one.key == other.key) == (one == other)


def test_dtypes_are_pytorchs() -> None:
    import torch

    for one in DTYPES.values():
        theirs = getattr(torch, one.torch)
        if one.packed > 1:  # PyTorch knows nothing of these but their size
            assert one.bytes == theirs.itemsize
            continue
        facts = torch.finfo(theirs) if theirs.is_floating_point else torch.iinfo(theirs)
        assert (one.bytes, one.maximum) == (theirs.itemsize, facts.max), one.name
        if theirs.is_floating_point:  # finfo's eps is wrong for float8_e5m2fnuz
            bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[one.bytes]
            next_up = (torch.ones(1).to(theirs).view(bits) + 1).view(theirs).double().item()
            assert one.epsilon == next_up - 1, one.name
        assert (one.is_fp8, one.is_integer) == (
            one.bytes == 1 and theirs.is_floating_point and one.name != "e8m0",  # an exponent only, a scale
            not theirs.is_floating_point,
        )


def test_trials_have_outcomes_and_records_rates() -> None:
    config = Config("tile", 16, 16, 16)
    trial = Trial(config, "ok", samples=(3.0, 1.0, 2.0, 4.0, 100.0))
    assert (trial.seconds, trial.spread) == (3.0, (4.0 - 2.0) / 2 / 3.0)
    fails(ValueError, "'fine' is not a status", Trial, config, "fine")
    record = Record(Problem(1000, 1000, 1000), "gfx942", Config("tile", 16, 16, 16), "triton", 1e-3, 0.0, "events")
    assert record.tflops == pytest.approx(2.0) and record.gbps == pytest.approx(6.0) and record.speedup is None
    assert Record.from_json({**record.to_json(), "library_seconds": 2e-3}).speedup == pytest.approx(2.0)


TRIAL = {"config": "tile__bm16__bn16__bk16__gm1__sk1__w4__s2", "status": "ok", "samples": [1e-6], "stage": "screen"}
RECORD = Record(Problem(16, 16, 16), "gfx942", Config("tile", 16, 16, 16), "triton", 1e-5, 0.0, "events").to_json()


SHUFFLED = Problem(16, 256, 256, *matrices(order="shuffled_16x16"), family="a8w8_blockscale")
SCALED = SHUFFLED.scaled(GRANULARITIES["group"]).to_json()
NO_NUMBERS = (math.nan, "x", True, None)
# A noun as a file has it, and values that its fields can't have.
REFUSED: dict[type[Any], tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    Trial: (
        TRIAL,
        {
            "config": (None, 5, "x", "tile__bm17", f"tile__bm{2**31}__bn16__bk16__gm1__sk1__w4__s2", "t" * 5000),
            "status": ("fine", None, 0, [], "wrong"),  # what is wrong has no samples
            "samples": ([], None, "x", ["a"], {}, [0], [-1.0], [math.nan], [math.inf], [True], [10**400]),
            "stage": ("third", None),
            "timer": (5, None),
            "reason": ([], "\ud800"),
            "error": (math.nan, -1, "x", True),
            "tolerance": (math.inf, "x"),
            "outside": ("x", -0.5),
        },
    ),
    Record: (
        RECORD,
        {
            "config": (None, "x", "triton.bm17"), "seconds": (0, -1.0, math.inf, "1", 10**400, *NO_NUMBERS),
            "library_seconds": (0, "x", -1e-6, math.nan), "spread": (-0.1, math.inf, *NO_NUMBERS),
            "winner": ([1], None), "target": (90, None), "timer": (5,), "library": (None,), "verified": ([],),
            "tie": (1, "yes"), "cold": (None, 0), "toolchain": (None, [], {"triton": 3}, {"triton": "\ud800"}),
            "compute_units": (-1, 1.5, True, "x", 2**40), "error": (math.nan, "x"), "tolerance": (math.inf, -1),
        },
    ),
    Problem: (
        SCALED,
        {
            "family": (None, 5, [], "\ud800"), "order_b": (None, []), "scales": (None, {}),
            "row_major_a": (1, None, "T"), "dtype": (None, "fp33", []), "rows": (-1, 1.0, True, "1", None),
            "depth": (-128, [], 10**30), "layout": (None, {"a": 1}), "pad": (None, [1], [1, 0], [1, [[]]], "ab"),
        },
    ),
}  # fmt: skip


@each("noun", REFUSED)
def test_a_noun_of_a_file_has_values_that_can_be(noun: type[Any]) -> None:
    """Of the right kind and in range; the message names the field and does not repeat what is long."""
    given, refused = REFUSED[noun]
    assert given.items() <= noun.from_json(given).to_json().items()
    for field, values in refused.items():
        for value in values:
            inner = given if field in given or noun is not Problem else given["scale_b"]
            changed = {**given, field: value} if inner is given else {**given, "scale_b": {**inner, field: value}}
            with pytest.raises(InputError, match=f"^{field} |is not a config name|^samples must") as said:
                noun.from_json(changed)
            assert len(str(said.value)) < 200


@each("name", target_files.target_names())
def test_every_target_can_be_read(name: str) -> None:
    """Facts are of the right kind and plausible; a space is there for each."""
    target = target_files.load_target(name)
    assert target.vendor == ("nvidia" if name.startswith("sm") else "amd")
    assert target.wave_size == (64 if name.startswith("gfx9") else 32)
    for field in ("compute_units", "lds_bytes", "registers_per_cu", "l2_bytes", "hbm_gbps", "clock_ghz", "launch_us"):
        assert getattr(target, field) > 0, field
    assert target.lds_bytes <= target.lds_per_cu and target.hbm_gbps < target.l2_gbps
    assert target.fp8 in ("fn", "fnuz", "none") and (target.fp8 != "none") == ("fp8" in target.peak_tflops)
    assert target.supports(DTYPES["fp16"]) and target.tflops(DTYPES["fp16"]) > 10
    assert target.has(next(iter(target.features))) and not target.has("antigravity")
    sections = target_files.space_file(name)["templates"]
    assert "tile" in sections
    for template, section in sections.items():
        for axis, values in {**section["axes"], **section.get("options", {})}.items():
            assert values and all(type(v) is int for v in values) and len(set(values)) == len(values), (template, axis)


def test_siblings_override_a_targets_file_and_errors_are_the_users() -> None:
    with pytest.raises(TargetError, match="gfx90a has no matrix instruction for fp8e4m3fn"):
        target_files.load_target("gfx90a").tflops(DTYPES["fp8e4m3fn"])
    plain, sibling = (
        target_files.load_target("sm90"),
        target_files.load_target("sm90", "NVIDIA H200", compute_units=100),
    )
    assert (sibling.compute_units, sibling.product) == (100, "H200")
    assert sibling.hbm_gbps > plain.hbm_gbps and sibling.clock_ghz == plain.clock_ghz
    from tritongemm.core import errors

    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    kinds = [e for e in kinds if not issubclass(e, Warning)]
    assert len(kinds) == 9 and all(issubclass(e, TritonGemmError) for e in kinds)
    assert str(errors.DriverError("cuX", 700, "CUDA_ERROR_Y", "bad")) == "cuX failed: CUDA_ERROR_Y (700): bad"
