"""triton.autotune over our `tile` kernel and the configs our rules keep for it, the best-predicted first."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType

from competitors import Ready, Refused, Setting
from tritongemm.backends.triton import backend as triton_backend
from tritongemm.codegen import geometry, modules, template_facts
from tritongemm.core.config import Config
from tritongemm.search.cost_model import model as cost_model
from tritongemm.search.pruning import prune
from tritongemm.search.space import space

NOTE = "triton.autotune over our `tile` kernel"
TEMPLATE = "tile"


def kept(setting: Setting) -> list[Config]:
    """Configs of the template that our rules keep, the best-predicted first."""
    entire = space(setting.problem, setting.target, templates=(TEMPLATE,))
    survivors = prune.prune(entire, setting.problem, setting.target).kept
    return [p.config for p in cost_model.rank(survivors, setting.problem, setting.target)]


def prepare(setting: Setting) -> Ready:
    """Tune the kernel of our template with triton.autotune."""
    import torch
    import triton

    problem, bench = setting.problem, setting.bench
    everything = kept(setting)
    tried = everything[: setting.autotune_configs]
    if not tried:
        raise Refused(f"no `{TEMPLATE}` config is kept")
    module = _imported(setting, tried)
    shapes = {c.name: geometry.geometry(c, problem, setting.target.compute_units) for c in tried}
    configs = []
    for config in tried:
        options = template_facts.compiler_options(config)
        warps, stages = options.pop("num_warps"), options.pop("num_stages")
        own = {"CONFIG": config.name, "GROUP_M": config.group_m}
        values = {**geometry.constants(config, problem), **own, **options}
        configs.append(triton.Config(values, num_warps=warps, num_stages=stages))
    tuner = triton.autotune(configs, key=["M", "N", "K"])(getattr(module, TEMPLATE))
    place = bench.sets[0]["a"].device
    partial_sums = torch.empty(max(1, *(s.workspace_bytes for s in shapes.values())), dtype=torch.uint8, device=place)
    counters = torch.zeros(max(1, *(s.semaphore_bytes // 4 for s in shapes.values())), dtype=torch.int32, device=place)
    scratch = partial_sums[: partial_sums.numel() // 4 * 4].view(torch.float32), counters
    sizes = (problem.m, problem.n, problem.k, *triton_backend.strides(problem))
    kernel = tuner[lambda meta: shapes[meta["CONFIG"]].grid]
    calls: list[Callable[[], object]] = [
        partial(kernel, s["a"], s["b"], s["c"], s["c"], *scratch, *sizes) for s in bench.sets
    ]
    started = time.perf_counter()
    calls[0]()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    best = getattr(tuner, "best_config", None)
    detail = {"tried": len(tried), "kept": len(everything), "best": best.kwargs["CONFIG"] if best else ""}
    return Ready(calls, seconds, detail)


def _imported(setting: Setting, configs: list[Config]) -> ModuleType:
    path = modules.write_candidates(setting.problem, configs, setting.target, setting.folder / "autotune")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
