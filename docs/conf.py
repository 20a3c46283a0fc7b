"""Sphinx settings: Markdown pages through MyST, the furo theme, nothing fetched while building."""

from __future__ import annotations

import sounding

project = "Sounding"
author = "the Sounding authors"
version = release = sounding.__version__
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "zoo", "claims"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"Sounding {version}"
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
