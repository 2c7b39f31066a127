"""A product of a linear layer and a result of it, as tests of other tools' files name them."""

from typing import Any

from tests.support.nouns import Config, Problem, Record

AITER_HEADER = (
    "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw"
)
REVISION = (100100 << 32) + 0xBF2C3184  # of hipBLASLt


def product(m: int = 16, n: int = 6144, k: int = 4096, dtype: str = "bf16", **more: Any) -> Problem:
    types = dict.fromkeys(("dtype_a", "dtype_b", "dtype_c"), dtype)
    return Problem.from_json({"m": m, "n": n, "k": k, "row_major_b": False} | types | more)


def result(problem: Problem, config: Config, **more: Any) -> Record:
    """A measured result, which the config's backend won."""
    facts = {"seconds": 2e-5, "spread": 0.0, "timer": "graph-events", "target": "gfx942", "winner": config.backend}
    return Record(problem, config=config, **{**facts, **more})


def algorithm(index: int = 44, version: int = REVISION) -> Config:
    name = "Cijk_Alik_Bljk_BBS_BH_MT64x64x64_SN"
    return Config(name, 0, 0, 0, options=(("index", index), ("version", version)), backend="blaslt")
