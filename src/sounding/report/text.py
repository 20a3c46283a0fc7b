"""Text of strangers in a page."""

from __future__ import annotations

import html

from sounding.errors import clean


def escape(text: str) -> str:
    """Text that is neither markup nor steers a terminal that shows the page: names of modules are a stranger's.

    >>> escape("<b>\\x1b")
    '&lt;b&gt;␛'
    """
    return html.escape(clean(text))
