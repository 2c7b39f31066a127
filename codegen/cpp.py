"""C++ sources rendered from templates/."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tritongemm.codegen.template_facts import TEMPLATES


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        autoescape=False,  # C++, not HTML
    )


def render_cpp(template: str, **values: Any) -> str:
    """The C++ text of a template.

    Args:
        template: path below templates/, e.g. ``ck/xdl.j2``.
        values: what the template names.
    """
    text: str = _environment().get_template(template).render(**values)
    return text
