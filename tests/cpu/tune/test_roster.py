from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.evaluators import FakeEvaluator
from tests.support.nouns import SUPPORTED, Capsys, Config, Defaults, Patch, Target, Trial, load_target, registry, sizes
from tests.support.racing import CODE, SIZE, TOY, Drop, race
from tests.support.refusals import refuses
from tritongemm.build import prepare
from tritongemm.build.cache import ArtifactCache
from tritongemm.cli import tune
from tritongemm.core.problem import Problem, matrices
from tritongemm.hip_ext.driver import driver
from tritongemm.plugins.contracts import Backend, Family, KernelBackend
from tritongemm.search_spaces import loader as target_files
from tritongemm.system import settings
from tritongemm.tune import roster
from tritongemm.tune.final_race import LIBRARY_PLACES, pick_finalists
from tritongemm.tune.roster import choose_roster

OWN = "a b c bias workspace semaphore m n k lda ldb ldc group_m null null"


def test_all_that_can_race_and_why_the_others_can_not(drop: Drop, monkeypatch: Patch) -> None:
    monkeypatch.delenv("TRITONGEMM_ASM_MANIFESTS", raising=False)
    monkeypatch.setattr(driver, "find_vendor", lambda: None)
    drop("toycode", CODE)
    everybody = choose_roster("all", runs=True)
    assert {"triton", "toycode"} <= set(everybody.backends) and "torch" not in everybody.backends
    assert "TRITONGEMM_ASM_MANIFESTS names none" in everybody.left_out["asm"]
    assert "no CUDA or HIP driver" in everybody.left_out["blaslt"]
    quick = choose_roster(None, runs=True)
    assert "toycode" not in quick.backends and "--libtype all" in quick.left_out["toycode"]
    assert "toycode" not in choose_roster("all", runs=False).backends, "nothing could check its results"
    assert "toycode" in choose_roster("all", runs=False, builds_only=True).backends


def test_asking_for_all_names_what_is_missing(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.delenv("TRITONGEMM_ASM_MANIFESTS", raising=False)
    monkeypatch.setattr(driver, "find_vendor", lambda: None)
    argv = ["-m", "16", "-n", "16", "-k", "16", "--generate_only", "-o", str(tmp_path / "out.yaml")]
    missing = "asm does not race: no manifest of assembly kernels"
    assert tune.main([*argv, "--libtype", "all"]) == 0 and missing in capsys.readouterr().err
    assert tune.main(argv) == 0 and missing not in capsys.readouterr().err


def test_names_on_the_command_line(drop: Drop, monkeypatch: Patch) -> None:
    drop("toycode", CODE)
    drop("toyabsent", TOY + "    def available(self):\n        return Support('its headers are absent')\n")
    monkeypatch.setattr(registry.get(Backend, "blaslt"), "available", lambda: SUPPORTED)
    assert choose_roster("hipblaslt, triton,cublaslt,torch", runs=True).backends == ("blaslt", "triton")
    assert choose_roster("torch", runs=True).backends == ("torch",)
    assert choose_roster("toycode", runs=True).backends == ("toycode",)
    for name, complaint in (
        ("triton,abacus", r"no backend is called 'abacus'; there are: all, .*triton.*hipblaslt"),
        ("toyabsent", "--libtype toyabsent: its headers are absent"),
    ):
        refuses(complaint, choose_roster, name, runs=True)
    for name, complaint in (("torch", "on its GPU only"), ("toycode", r"only be compiled \(--compile_only\)")):
        refuses(complaint, choose_roster, name, runs=False)


def trial(backend: str, index: int, us: float) -> Trial:
    return Trial(Config("t", index, 1, 1, backend=backend), "ok", samples=(us * 1e-6,))


def test_near_copies_and_who_can_not_win_are_represented_by_a_few() -> None:
    libraries = [trial("blaslt", i, 1 + i / 100) for i in range(50)]
    ours = [trial("triton", i, 1 + i / 100) for i in range(50)]
    code = [trial("asm", i, 9) for i in range(9)]
    first, rest = pick_finalists([*libraries, *ours, *code, Trial(Config("t", 99, 1, 1, backend="asm"), "wrong")], 12)
    assert len({*first, *rest}) == len(first) + len(rest) == 109
    backends = [t.config.backend for t in first]
    assert {b: backends.count(b) for b in backends} == {"blaslt": 7, "triton": 6, "asm": 3}
    assert {t.config.backend for t in rest[:44]} == {"triton"}, "the next in line are ours"
    alone, rest = pick_finalists(ours, 5)
    assert (alone, rest) == (ours[:5], ours[5:])
    slow, fast = ([trial(name, i, us + i / 100) for i in range(20)] for name, us in (("blaslt", 2), ("triton", 1)))
    assert set(pick_finalists([*slow, *fast], 12)[0]) == {*slow[:3], *fast[:7]}
    fast, slow = ([trial(name, i, us + i / 100) for i in range(20)] for name, us in (("blaslt", 1), ("triton", 2)))
    assert set(pick_finalists([*slow, *fast], 12)[0]) == {*fast[:7], *slow[:3]}
    alike = [trial("blaslt", i, 1 + i / 10000) for i in range(50)]
    first, _ = pick_finalists(alike, 12)
    assert first == alike[:LIBRARY_PLACES]
    favourite, *others = [trial("blaslt", 0, 100), *(trial("blaslt", i, 1 + i) for i in range(1, 9))]
    first, _ = pick_finalists([favourite, *others], 12)
    assert set(first) == {favourite, *others[:3]}


def test_a_backend_of_code_races_with_triton(drop: Drop, tmp_path: Path) -> None:
    drop("toycode", CODE)
    broken = "    def _candidates(self, problem, target, inputs, everything):\n"
    broken += "        raise ZeroDivisionError('no headers')\n"
    drop("toybroken", TOY + broken)
    evaluator = FakeEvaluator()
    failures, store, said = race(tmp_path, ("blaslt", "toybroken", "toycode", "triton"), evaluator)
    assert failures == {}
    found = {
        t.config.block_m: t
        for (_, s), t in store.trials(SIZE).items()
        if t.config.backend == "toycode" and s == "screen"
    }
    assert (found[1].status, found[2].status, found[3].status) == ("ok", "compile_failed", "compile_failed")
    assert "two is no number" in found[2].reason and "three is truncated" in found[3].reason
    assert {c.backend for c in evaluator.raced} == {"toycode", "triton"}
    record = store.record(SIZE)
    assert record and (record.winner, record.config.block_m) == ("toycode", 1)
    assert "toybroken does not race: ZeroDivisionError: no headers" in said
    assert "blaslt does not race: blaslt lacks a symbol" in said and "toycode brings 3 candidates" in said


def test_without_triton_its_space_is_not_searched(drop: Drop, tmp_path: Path) -> None:
    drop("toycode", CODE)
    failures, store, _ = race(tmp_path, ("toycode",))
    assert failures == {} and {t.config.backend for t in store.trials(SIZE).values()} == {"toycode"}
    assert not [*tmp_path.glob("generated_kernel*")]
    drop("toynone", TOY + "    def _supports(self, problem, target):\n        return Support('not on Mondays')\n")
    failures, _, _ = race(tmp_path / "none", ("toynone",))
    assert failures[SIZE].startswith("no candidate passed: toynone brought none, toynone: not on Mondays")
    assert "triton could compute it: --libtype triton" in failures[SIZE]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel of ours as an assembly kernel, in a manifest whose other rows are wrong in one way each."""
    facts, folder = load_target("gfx942"), tmp_path_factory.mktemp("asm")
    config = Config.parse("tile__bm16__bn16__bk32__gm1__sk1__w1__s2__kpack1__matrix_instr_nonkdim16__waves_per_eu0")
    triton_backend = registry.get(KernelBackend, "triton")
    built, code, name = triton_backend.compile(triton_backend.compile_job(config, SIZE, facts))
    (folder / name).write_bytes(code)
    (folder / "short.co").write_bytes(code[: len(code) // 2])
    rest = f"mn,{built.launch['dynamic_shared']},{built.threads},fp16,TT"
    text = "knl_name,co_name,tile_m,tile_n,layout,grid,lds,threads,dtypes,trans\n"
    text += f"{built.symbol},{name},16,16,{OWN},{rest}\n"
    text += f"missing,absent.co,17,16,{OWN},{rest}\n"
    text += f"truncated,short.co,18,16,{OWN},{rest}\n"
    text += f"absent_symbol,{name},20,16,{OWN},{rest}\n"
    (folder / "kernels.csv").write_text(text)
    return folder / "kernels.csv"


def test_bad_manifest_rows_cost_themselves(manifest: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.setenv("TRITONGEMM_ASM_MANIFESTS", str(manifest))
    failures, store, _ = race(tmp_path, ("asm", "triton"))
    assert failures == {}
    reasons = {t.config.template: t.reason for t in store.trials(SIZE).values() if t.status == "compile_failed"}
    assert "there is no " in reasons["missing"] and "truncated" in reasons["truncated"]
    assert "holds tile__" in reasons["absent_symbol"]
    record = store.record(SIZE)
    assert record and record.winner == record.config.backend == "asm"
    (row,) = sizes.from_file(tmp_path / "out.yaml", Defaults())
    assert row.record == record
    # What can't be checked without a GPU says so; a kernel that no manifest has any more costs its row.
    monkeypatch.setattr(driver, "find_vendor", lambda: None)
    argv = ["--gemm_size_file", str(tmp_path / "out.yaml"), "--compare_wo_tuning", "--num_threads", "1"]
    assert tune.main(argv) == 1 and "only a GPU can check a kernel of asm" in capsys.readouterr().out
    found = prepare.prepare_launches([record], load_target("gfx942"), ArtifactCache(settings.cache_folder()))
    launch = found[SIZE]
    assert not isinstance(launch, str) and launch.symbol == record.config.template
    assert Path(launch.path).read_bytes() == (manifest.parent / "kernel.hsaco").read_bytes()
    monkeypatch.setenv("TRITONGEMM_ASM_MANIFESTS", "")
    assert tune.main(argv) == 1
    assert "--manifest names them" in " ".join(capsys.readouterr().out.split()), "no manifest holds this kernel"
    found = prepare.prepare_launches([record], load_target("gfx942"), ArtifactCache(settings.cache_folder()))
    assert "no manifest holds this kernel" in str(found[SIZE])


@pytest.mark.parametrize("text", [None, "knl_name,co_name\n", "knl_name,co_name,tileM,tileN\nk,k.co,many,1\n"])
def test_a_bad_manifest_costs_its_backend(drop: Drop, text: str | None, tmp_path: Path, monkeypatch: Patch) -> None:
    drop("toycode", CODE)
    path = tmp_path / "bad.csv"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("TRITONGEMM_ASM_MANIFESTS", str(path))
    failures, store, said = race(tmp_path, ("asm", "toycode"))
    assert failures == {} and store.record(SIZE) and f"asm does not race: {path}: " in said


def without_dot_scaled(target: Target) -> Target:
    return replace(target, features=target.features - {"dot_scaled"})


def test_other_backends_that_could_compute_a_problem(monkeypatch: Patch) -> None:
    """Each backend that was not tried says how to have it race, and what it lacks here."""
    monkeypatch.delenv("TRITONGEMM_ASM_MANIFESTS", raising=False)
    gfx950 = without_dot_scaled(load_target("gfx950"))
    plain = Problem(64, 64, 512, *matrices("fp4e2m1", c="bf16", layout="TN"))
    fp4 = registry.get(Family, "a4w4_blockscale").problem(plain)
    hints = ", ".join(roster.suggest_backends(fp4, gfx950, ("triton",)))
    assert "ck could compute it: --libtype ck" in hints
    assert "asm could compute it: --libtype asm (no manifest of assembly kernels: TRITONGEMM_ASM_MANIFESTS" in hints
    assert hints.startswith("triton: no kernel template that gfx950 runs has such operands")
    assert "torch" not in hints and "cutlass" not in hints and "--libtype triton" not in hints
    assert roster.suggest_backends(SIZE, gfx950, ("triton",)) == [], "Triton has kernels for it"


def test_a_family_without_kernels_says_what_brings_some(tmp_path: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.setattr(driver, "find_vendor", lambda: None)
    load = load_target
    monkeypatch.setattr(target_files, "load_target", lambda *a, **facts: without_dot_scaled(load(*a, **facts)))
    monkeypatch.delenv("TRITONGEMM_ASM_MANIFESTS", raising=False)
    size = ["-m", "64", "-n", "64", "-k", "512", "-dtype_a", "fp4e2m1", "-dtype_b", "fp4e2m1", "-col_b"]
    argv = [*size, "-dtype_c", "bf16", "--family", "a4w4_blockscale", "--target", "gfx950", "--num_threads", "1"]
    assert tune.main([*argv, "-o", str(tmp_path / "out.yaml")]) == 1
    said = " ".join("".join(capsys.readouterr()).split())
    assert "triton: no kernel template that gfx950 runs has such operands" in said
    assert "ck could compute it: --libtype ck" in said
    path = tmp_path / "kernels.csv"
    path.write_text(f"knl_name,co_name,tile_m,tile_n,layout\nk,k.co,16,16,{OWN}\n")
    monkeypatch.setenv("TRITONGEMM_ASM_MANIFESTS", str(path))
    argv += ["--libtype", "asm", "--compile_only", "-o", str(tmp_path / "asm.yaml")]
    assert tune.main(argv) == 1
    said = " ".join("".join(capsys.readouterr()).split())
    assert "asm: k: it takes no scales, the problem has scale_a and scale_b" in said
    assert "ck could compute it: --libtype ck" in said
