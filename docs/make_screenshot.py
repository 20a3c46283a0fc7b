"""Photograph the report of the embedded example and the explorer: `python docs/make_screenshot.py [report] [explore]`.

Needs Chromium, tests/ and, for the explorer, the extra `explore`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "pictures"
SOUNDING = [sys.executable, "-m", "sounding"]


def photograph_report(page: Any, shot: Path) -> None:
    """The verdicts and the charts of a report, without the findings in between."""
    report = shot.with_suffix(".html")
    subprocess.run([*SOUNDING, "check", "--quiet", "--html", str(report)], check=False)
    page.resize(1300, 1560)
    page.open(report, ready="document.querySelectorAll('.plot .trace').length > 0")
    page.evaluate("document.getElementById('findings').remove()")
    page.screenshot(shot, whole=False)


def photograph_explorer(page: Any, shot: Path) -> None:
    """The explorer as it opens."""
    server = subprocess.Popen(
        [*SOUNDING, "explore", "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert server.stdout is not None
    try:
        page.resize(1300, 1000)
        page.send("Page.navigate", url=next(word for word in server.stdout.readline().split() if "://" in word))
        page.wait("!document.querySelector('.waiting') && document.querySelectorAll('section svg').length >= 3")
        page.screenshot(shot)
    finally:
        server.terminate()
        server.wait(timeout=30)


PICTURES = {"report": photograph_report, "explore": photograph_explorer}


def main(names: list[str]) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from browser import find_browser, open_browser

    browser = find_browser()
    if browser is None:
        sys.exit("no Chromium found: apt-get install chromium")
    for name in names or PICTURES:
        with tempfile.TemporaryDirectory() as folder, open_browser(browser) as page:
            shot = Path(folder) / f"{name}.png"
            PICTURES[name](page, shot)
            # few colours: a quarter of the size
            Image.open(shot).convert("RGB").quantize(96).save(FOLDER / shot.name, optimize=True)
        print(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
