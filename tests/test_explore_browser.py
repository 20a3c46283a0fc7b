"""The explorer in a real browser: moved by mouse and keys, in both colours, at the width of a phone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from browser import find_browser, open_browser

pytest.importorskip("uvicorn", reason="the extra `explore` is not installed")
BROWSER = find_browser()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH (apt-get install chromium)"),
]
READY = "document.querySelectorAll('.waiting').length === 0 && document.querySelectorAll('section svg').length >= 3"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A running explorer."""
    code = "from sounding.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "explore", "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        yield next(word for word in line.split() if word.startswith("http"))
    finally:
        process.terminate()
        process.wait(timeout=30)
        process.stdout.close()


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    assert BROWSER is not None
    with open_browser(BROWSER) as opened:
        yield opened


def open_at(page: Any, address: str) -> None:
    page.events.clear()
    page.send("Page.navigate", url="about:blank")
    page.send("Page.navigate", url=address)
    page.wait(f"document.readyState === 'complete' && {READY}", seconds=60)


def number(page: Any) -> str:
    return str(page.evaluate("document.querySelector('#numbers dt').textContent"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1300])
def test_it_draws_and_fits(page: Any, address: str, width: int, dark: bool) -> None:
    page.resize(width, dark=dark)
    open_at(page, address)
    assert page.complaints() == []
    assert all(request.startswith((address, "data:", "about:")) for request in page.requests())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert number(page) == "1.522"


def test_keys_move_a_slider_and_numbers_follow(page: Any, address: str) -> None:
    page.resize(1300)
    open_at(page, address)
    page.evaluate("document.querySelector('[name=eps]').focus()")
    for _ in range(3):
        for kind in ("rawKeyDown", "keyUp"):
            page.send("Input.dispatchKeyEvent", type=kind, key="End", code="End", windowsVirtualKeyCode=35)
    page.wait("document.querySelector('#numbers dt') && document.querySelector('#numbers dt').textContent !== '1.522'")
    assert "eps=1000" in page.evaluate("location.hash")


def test_a_click_opens_the_python_call_and_a_link_holds_the_state(page: Any, address: str) -> None:
    open_at(page, f"{address}#network=plain&activation=tanh&weight_std=1.3&depth=20")
    assert page.evaluate("document.querySelector('[name=network]').value") == "plain"
    assert not page.evaluate("document.querySelector('[name=weight_std]').closest('label').hidden")
    assert page.evaluate("document.querySelector('[name=batch_size]').closest('label').hidden")
    box = page.evaluate(
        "(r => [r.x + 10, r.y + r.height / 2])(document.querySelector('#numbers summary').getBoundingClientRect())"
    )
    for kind in ("mousePressed", "mouseReleased"):
        page.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)
    page.wait("document.querySelector('#numbers details').open")
    assert "sounding.predict.vanilla('tanh', weight_std=1.3" in page.evaluate(
        "document.querySelector('#numbers pre').textContent"
    )


def test_a_wrong_formula_is_a_sentence_on_the_page(page: Any, address: str) -> None:
    page.events.clear()
    page.send("Page.navigate", url="about:blank")
    page.send("Page.navigate", url=f"{address}#activation=formula&formula=oops(x)")
    page.wait("document.querySelector('#numbers .error') !== null", seconds=60)
    assert "expected a function among" in page.evaluate("document.querySelector('#numbers .error').textContent")
