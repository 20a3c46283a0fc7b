"""Sphinx settings: Markdown pages through MyST, formulas as MathML, nothing fetched while building or reading."""

from __future__ import annotations

import re
from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.util.logging import getLogger

import sounding
from sounding.look import ACCENT, ACCENT_ON_DARK

project = "Sounding"
author = "the Sounding authors"
version = release = sounding.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "zoo", "claims"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
html_math_renderer = "mathml"
html_theme = "furo"
html_theme_options = {
    f"{ground}_css_variables": {"color-brand-primary": colour, "color-brand-content": colour}
    for ground, colour in (("light", ACCENT), ("dark", ACCENT_ON_DARK))
}
html_title = f"Sounding {version}"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["sounding.css"]
pygments_style = "friendly"
pygments_dark_style = "monokai"
# the empty line that ends an example for doctest is not shown
highlight_options = {language: {"stripnl": True} for language in ("python", "pycon")}
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"


def _write_inline(translator: Any, node: Any) -> None:
    translator.body.append(convert(node.astext()))
    raise SkipNode


def _write_block(translator: Any, node: Any) -> None:
    translator.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise SkipNode


def _plain_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Give docstrings the formulas of Markdown, $…$, and keep bars, stars and underscores beside them.

    reStructuredText would read those as markup.
    """
    for place, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = line.split("`")
            parts[::2] = [_formulas(part) for part in parts[::2]]
            lines[place] = "`".join(parts)


def _formulas(text: str) -> str:
    parts = text.split("$")
    if len(parts) % 2 == 0:
        return _escape(text)
    parts[::2] = [_escape(part) for part in parts[::2]]
    parts[1::2] = [f":math:`{part}`" for part in parts[1::2]]
    return "".join(parts)


def _escape(text: str) -> str:
    return re.sub(r"([|*]|_(?!\w))", r"\\\1", text)


def _skip_fields(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples, of which Python says no more than their number; the class tells them."""
    return True if str(getattr(thing, "__doc__", "")).startswith("Alias for field number") else None


def _find_raw_formulas(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Warn, which fails the build, where a reader would see the source of a formula."""
    text = re.sub(r"<(code|pre|math|script)\b.*?</\1>|<[^>]*>", "", context.get("body", ""), flags=re.DOTALL)
    for found in re.finditer(r".{0,40}(\$[^\s$]|\\[a-zA-Z]{2}|``).{0,40}", text):
        getLogger(__name__).warning("%s shows a formula or markup as its source: %s", page, found[0])


def setup(app: Any) -> None:
    """Write formulas as MathML, which browsers draw without a script or a font from elsewhere, and miss none."""
    app.connect("autodoc-process-docstring", _plain_text, priority=100)  # before napoleon adds markup of its own
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("html-page-context", _find_raw_formulas)
    app.add_html_math_renderer("mathml", inline_renderers=(_write_inline, None), block_renderers=(_write_block, None))
