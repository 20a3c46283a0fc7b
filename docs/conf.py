"""Sphinx settings: Markdown pages through MyST, formulas as MathML, nothing fetched while building or reading."""

from __future__ import annotations

import re
from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

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
    """Keep the bars, stars and underscores of formulas in docstrings: reStructuredText would read them as markup."""
    for place, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = line.split("`")
            parts[::2] = [re.sub(r"([|*]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
            lines[place] = "`".join(parts)


def setup(app: Any) -> None:
    """Write formulas as MathML, which browsers draw without a script or a font from elsewhere."""
    app.connect("autodoc-process-docstring", _plain_text, priority=100)  # before napoleon adds markup of its own
    app.add_html_math_renderer("mathml", inline_renderers=(_write_inline, None), block_renderers=(_write_block, None))
