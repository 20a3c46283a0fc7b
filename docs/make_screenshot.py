"""Photograph the HTML report of the embedded example: `python docs/make_screenshot.py`. Needs Chromium and tests/."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parent.parent
PICTURE = Path(__file__).parent / "pictures" / "report.png"
WIDTH, HEIGHT = 1300, 1560


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from browser import find_browser, open_browser

    browser = find_browser()
    if browser is None:
        sys.exit("no Chromium found: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        report, shot = Path(folder) / "report.html", Path(folder) / "report.png"
        subprocess.run([sys.executable, "-m", "sounding", "check", "--quiet", "--html", str(report)], check=False)
        with open_browser(browser) as page:
            page.resize(WIDTH, HEIGHT)
            page.open(report, ready="document.querySelectorAll('.plot .trace').length > 0")
            # the verdict and the charts, without the findings in between
            page.evaluate("document.getElementById('findings').remove()")
            page.screenshot(shot, whole=False)
        # few colours: a quarter of the size
        Image.open(shot).convert("RGB").quantize(96).save(PICTURE, optimize=True)
    print(PICTURE)


if __name__ == "__main__":
    main()
