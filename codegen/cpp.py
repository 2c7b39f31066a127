"""The rendering of C++ sources from templates/."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from tritongemm.codegen.template_facts import TEMPLATES

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # what is served is compiled already

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        autoescape=False,  # C++, not HTML
    )


def render_cpp(template: str, **values: Any) -> str:
    """Return the C++ text of a template.

    Args:
        template: path below templates/, e.g. ``ck/xdl.j2``.
        values: values of the names in the template.
    """
    text: str = _environment().get_template(template).render(**values)
    return text
