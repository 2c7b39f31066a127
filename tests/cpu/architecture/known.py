"""What does not hold yet, by rule, each with the reason. It only shrinks: an entry that is needed no more fails."""

from __future__ import annotations

from collections.abc import Collection, Iterable

BACKENDS = "backends are modules still, asked by their names"
CONTRACTS = "all contracts lie in one file"
DOOR = "the package hides the module of the same name"
EXPORT = "exporting has a branch for each backend still"
FORMATS = "formats are modules still, and tune_gemm checks its rows against the templates"
MOVING = "its part is not converted yet"
TABLE = "an arrow that goes up until the noun it needs lies in core"
TEMPLATES = "the template's facts do not tell this yet"

KNOWN: dict[str, dict[str, str]] = {
    "every door opens": {
        "python -m tritongemm.export": DOOR,
    },
    "imports go down": {
        "tritongemm.formats.tune_gemm -> tritongemm.codegen.template_facts": FORMATS,
        "tritongemm.tuning.revalidate -> tritongemm.report.console": BACKENDS,
    },
    "no import cycles": {},
    "nobody compares with a plug-in's or a template's name": {
        "backends.cutlass.backend: config.template != 'stream_k'": TEMPLATES,
        "backends.cutlass.backend: config.template == 'stream_k'": TEMPLATES,
        "core.config: self.backend == 'triton'": BACKENDS,
        "core.problem: self.family != 'dense'": TABLE,
        "formats.tune_gemm: backend == 'triton'": FORMATS,
        "report.candidates_csv: config.backend == 'triton'": BACKENDS,
        "results.store: registry.load('formats', 'tune_gemm')": FORMATS,
    },
    "plug-ins are imported by the registry alone": {
    },
    "class names are unique": {
    },
    "files are short": {
        "tritongemm/plugins/contracts.py": CONTRACTS,
    },
    "no object is probed": {
        "build.pool: getattr(backend, 'COMPILE_SECONDS', 0.0)": BACKENDS,
        "plugins._modules: getattr(module, 'unavailable', None)": BACKENDS,
        "plugins._modules: hasattr(module, '__path__')": BACKENDS,
        "tuning.revalidate: hasattr(backend, 'job')": BACKENDS,
        "tuning.roster: getattr(plugin, 'refusal', None)": BACKENDS,
        "tuning.roster: getattr(registry.load('backends', backend), 'ALIASES', ())": BACKENDS,
        "tuning.roster: getattr(registry.load('backends', backend), 'COMPILE_SECONDS', 0.0)": BACKENDS,
        "tuning.roster: hasattr(registry.load('backends', backend), 'configs')": BACKENDS,
        "tuning.roster: hasattr(registry.load('backends', backend), 'enumerate')": BACKENDS,
    },
    "no test climbs out of the repository": {},
}


def check(rule: str, offenders: Iterable[str], advice: str, allowed: Collection[str] = ()) -> None:
    """Fail on offenders that are not known, and on known or allowed ones that offend no more; names all of them.

    Args:
        rule: key of `KNOWN`.
        offenders: what breaks the rule, each in a form that does not change with line numbers.
        advice: what to do about one.
        allowed: offenders that may stay.
    """
    found, known = set(offenders), KNOWN.get(rule, {})
    faults = [(advice, sorted(found - known.keys() - set(allowed)))]
    faults += [("these hold now: take them out of known.py", sorted(known.keys() - found))]
    faults += [("nobody writes these any more: take them out of what is allowed", sorted(set(allowed) - found))]
    said = [f"{text}\n  " + "\n  ".join(names) for text, names in faults if names]
    assert not said, f"{rule}: " + "\n".join(said)
