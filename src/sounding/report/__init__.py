"""A report as one self-contained HTML file: it opens anywhere, asks no server, and can be sent as it is."""

from __future__ import annotations

from sounding.report.document import render_html, write_html

__all__ = ["render_html", "write_html"]
