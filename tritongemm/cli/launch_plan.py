"""The command line of `tritongemm launch-plan`: a config's code object and its launch, as files.

No GPU is needed: an emulator, a debugger or another runtime can start the kernel from them. For each launch, in the
order they run, the folder gets ``plan_<i>.json`` and ``plan_<i>.<hsaco or cubin>``. A library whose host code starts
the kernels (CK) is there as well, ``plan_<i>.so``; what it sets to zero first has ``init`` zero. A plan has these keys:

arch, object, kernel    architecture, file name of the code object, symbol
grid, block             workgroups and threads along x, y, z
dynamic_lds             bytes of LDS beside what the code object declares
kernarg                 the parameter block in hex, hidden arguments included, every pointer zero
buffers                 memory to allocate: name; offset of its pointer in the parameter block; bytes; role (a, b, c,
                        bias, workspace, semaphore, offsets, counts …); init (random, zero, poison or values); dtype;
                        shape; strides in elements; order, for a B in an order of `numerics.weight_layouts`; scaling,
                        for scales that change along K: the rows of A (columns of B) and the depth along K that share
                        one, and their layout; values, where they are given
problem, launches       M, N, K, and batch where there is one; how often to launch
product                 all that is known of the product, as in a journal
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from tritongemm.build.cache import ArtifactCache
from tritongemm.build.pool import BuildPool
from tritongemm.cli import arguments, options, shell
from tritongemm.core.errors import InputError
from tritongemm.core.launch import HostLaunch
from tritongemm.export import launch_plans
from tritongemm.export.selection import Selection, emptied, launches, planned_backends
from tritongemm.plugins import registry
from tritongemm.plugins.contracts import Family, SearchedBackend
from tritongemm.search_spaces import loader as target_files
from tritongemm.system import files, settings

_TARGET = "gfx942"  # the default


@shell.command
def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is one of `cli.shell`."""
    for path in _run(parser().parse_args(argv)):
        print(path)
    return shell.DONE


def parser() -> arguments.Parser:
    """Return the options of the command."""
    p = arguments.Parser("tritongemm launch-plan", usage="%(prog)s -m M -n N -k K -o DIR [OPTION ...]")
    g = p.add_argument_group("what to run")
    options.problem_options(g)
    options.add_target(g, default=_TARGET)
    g.add_argument("--config", metavar="NAME", help="the config; default: the one predicted fastest that "
                   "a plan can hold")  # fmt: skip
    g.add_argument("--backend", default=registry.every(SearchedBackend)[0].name, choices=planned_backends(),
                   help="backend of the kernels, without --config (default %(default)s)")  # fmt: skip
    g.add_argument("--manifest", type=arguments.path, action="append", default=[], metavar="FILE",
        help="manifest of assembly kernels; may be repeated (default: TRITONGEMM_ASM_MANIFESTS)")  # fmt: skip
    g.add_argument("--all", type=arguments.integer(0, arguments.LARGEST_SIZE), default=0, metavar="N",
                   help="write the N configs predicted fastest, and the best of each template")  # fmt: skip
    g = p.add_argument_group("result")
    g.add_argument("-o", "--output", type=arguments.output_folder, required=True, metavar="DIR",
        help="folder for the files; created if it is missing")  # fmt: skip
    arguments.add_compiling(g)
    return p


def _run(args: argparse.Namespace) -> Iterator[Path]:
    facts = target_files.load_target(args.target or _TARGET)
    problem, folder = options.problem(args, facts), Path(args.output)
    refusal = registry.get(Family, problem.family).supports(problem, facts)
    if not refusal:
        raise InputError(f"{problem.key}: {refusal}")
    which = Selection(args.config, args.all, args.backend, tuple(map(Path, args.manifest)))
    with (
        emptied(folder),
        closing(BuildPool(ArtifactCache(settings.cache_folder()), args.num_threads, args.timeout)) as compiler,
    ):
        index = 0
        for launch in launches(problem, facts, compiler, which, shell.report):
            if isinstance(launch, HostLaunch):
                shutil.copyfile(launch.path, folder / f"plan_{index}{Path(launch.path).suffix}")
            for code, suffix, plan in launch_plans.launch_plans(launch, problem, facts):
                path = folder / f"plan_{index}.json"
                files.atomic_write(folder / f"plan_{index}{suffix}", code)
                plan = {"arch": plan.pop("arch"), "object": f"plan_{index}{suffix}", **plan}
                files.atomic_write(path, json.dumps(plan, indent=1) + "\n")
                index += 1
                yield path
