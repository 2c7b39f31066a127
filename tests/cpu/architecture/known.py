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
        "tritongemm.build.background -> tritongemm.tuning.task": TABLE,
        "tritongemm.export.kernel_manifest -> tritongemm.backends.triton.backend": EXPORT,
        "tritongemm.export.selection -> tritongemm.backends.asm.backend": EXPORT,
        "tritongemm.export.selection -> tritongemm.backends.ck.backend": EXPORT,
        "tritongemm.formats.tune_gemm -> tritongemm.codegen.template_facts": FORMATS,
        "tritongemm.tuning.revalidate -> tritongemm.report.console": BACKENDS,
    },
    "no import cycles": {
        "tritongemm.backends.blaslt.backend -> tritongemm.backends.blaslt.served_algorithm -> tritongemm.backends.blaslt.backend": MOVING,  # noqa: E501
    },
    "nobody compares with a plug-in's or a template's name": {
        "backends.cutlass.backend: config.template != 'stream_k'": TEMPLATES,
        "backends.cutlass.backend: config.template == 'stream_k'": TEMPLATES,
        "build.prepare: config.backend == 'triton'": BACKENDS,
        "core.config: self.backend == 'triton'": BACKENDS,
        "core.problem: self.family != 'dense'": TABLE,
        "export.kernel_manifest: r.config.backend == 'triton'": EXPORT,
        "export.selection: c.backend == 'triton'": EXPORT,
        "export.selection: config.backend != 'triton'": EXPORT,
        "export.selection: config.backend == 'asm'": EXPORT,
        "export.selection: config.backend == 'ck'": EXPORT,
        "export.selection: config.backend == 'triton'": EXPORT,
        "export.selection: which.backend == 'ck'": EXPORT,
        "export.selection: which.backend == 'triton'": EXPORT,
        "formats.tune_gemm: backend == 'triton'": FORMATS,
        "report.candidates_csv: config.backend == 'triton'": BACKENDS,
        "results.store: registry.load('formats', 'tune_gemm')": FORMATS,
        "tuning.final_race: t.config.backend == roster.SEARCHED": BACKENDS,
        "tuning.finalists: t.config.backend != SEARCHED": BACKENDS,
        "tuning.planning: roster.SEARCHED in what.backends": BACKENDS,
        "tuning.revalidate: row.config.backend == roster.SEARCHED": BACKENDS,
        "tuning.roster: n != BASELINE": BACKENDS,
        "tuning.roster: name == SEARCHED": BACKENDS,
    },
    "plug-ins are imported by the registry alone": {
        "tritongemm.export.kernel_manifest -> tritongemm.backends.triton.backend": EXPORT,
        "tritongemm.export.selection -> tritongemm.backends.asm.backend": EXPORT,
        "tritongemm.export.selection -> tritongemm.backends.ck.backend": EXPORT,
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
