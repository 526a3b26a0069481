"""Self-contained HTML pages from the templates in this folder. Text is escaped, so nothing in it is interpreted as
HTML."""

from __future__ import annotations

from pathlib import Path

TEMPLATES = Path(__file__).parent


def render(template: str, **values: object) -> str:
    """The page of a template; a value that the template needs and that is not given is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)
