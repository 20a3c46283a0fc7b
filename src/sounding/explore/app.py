"""The server of the explorer: one page, its two files, and one address per panel; for this machine alone."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib import resources
from typing import TYPE_CHECKING, Any

from sounding.errors import SoundingError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOSTS = ("127.0.0.1", "localhost", "[::1]")
FILES = {
    "/": ("explore.html", "text/html"),
    "/explore.js": ("explore.js", "text/javascript"),
    "/explore.css": ("explore.css", "text/css"),
}
GUARDS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
PATIENCE = 20.0  # seconds for one panel; a formula may be costly, and a page must not wait for ever


def make_app() -> Starlette:
    """The application; only requests whose Host header names this machine are answered.

    Another page that a browser shows can make it send requests here, under a name of its own that points to this
    machine. The Host header tells.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.routing import Route

    routes = [Route(path, _file(*what)) for path, what in FILES.items()]
    routes += [Route("/panel/{name}", _panel), Route("/choices", _choices)]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=_guard)])


async def _guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    """The answer to a request, with the same headers always; foreign names of this machine are refused."""
    from starlette.responses import PlainTextResponse

    name = re.sub(r":\d*$", "", request.headers.get("host", "").lower())  # without the port
    if name in HOSTS and request.method in ("GET", "HEAD"):
        response = await answer(request)
    else:
        text = "The explorer answers GET requests to 127.0.0.1 and localhost only.\n"
        response = PlainTextResponse(text, status_code=403)
    response.headers.update(GUARDS)
    return response


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    from starlette.responses import Response

    content = (resources.files("sounding.explore") / "page" / name).read_bytes()

    async def answer(_request: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


async def _choices(_request: Request) -> Response:
    """What the page offers: activations, networks, and the limits of every number."""
    from sounding.activations import names
    from sounding.explore.state import CHOICES, LIMITS, State

    return _json({"activations": [*names(), "formula"], "limits": LIMITS, "defaults": asdict(State()), **CHOICES})


async def _panel(request: Request) -> Response:
    """One panel for the settings in the address; what is wrong with them is a sentence."""
    from sounding.explore.panels import PANELS
    from sounding.explore.state import parse_state

    name = request.path_params["name"]
    if name not in PANELS:
        return _json({"error": f"no panel {name!r}: one of {', '.join(PANELS)}"}, status=404)
    try:
        state = parse_state(request.query_params)
        work = asyncio.get_running_loop().run_in_executor(None, functools.partial(PANELS[name], state))
        panel = await asyncio.wait_for(work, PATIENCE)
    except SoundingError as error:
        return _json({"error": str(error)}, status=400)
    except TimeoutError:
        return _json({"error": f"this takes longer than {PATIENCE:g} seconds"}, status=503)
    return _json(panel.to_dict())


def _json(content: Any, *, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(content, allow_nan=False), status_code=status, media_type="application/json")
