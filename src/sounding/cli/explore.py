"""`sounding explore`: a local web page to feel the theory."""

from __future__ import annotations

import contextlib
import socket
import threading
import webbrowser

import click

from sounding.cli.output import say
from sounding.errors import UsageError
from sounding.lazy import import_extra


@click.command()
@click.option("--port", type=click.IntRange(min=0, max=65535), default=8765, metavar="N",
              help="Port of this machine at which the page is served. 0 takes a free one.")  # fmt: skip
@click.option("--no-browser", is_flag=True, help="Do not open a browser, only print the address.")
def explore(port: int, no_browser: bool) -> None:
    """Open a local web page on which you change the settings of a random network, and see what theory says of it.

    The page is served to this machine only and loads nothing from elsewhere. Ctrl-C ends it. It needs the extra
    `explore`: pip install 'sounding[explore]'.
    """
    import_extra("starlette", extra="explore", needed_for="the explorer")
    uvicorn = import_extra("uvicorn", extra="explore", needed_for="the explorer")
    from sounding.explore.app import make_app

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # a port that was just given back can be taken at once
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        raise UsageError(f"port {port} of this machine cannot be used: {error.strerror}", hint="--port 0") from None
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    say(f"The explorer is at {address} (Ctrl-C ends it).")
    if not no_browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()  # the server must answer before the browser asks
    server = uvicorn.Server(uvicorn.Config(make_app(), log_level="warning", access_log=False, server_header=False))
    with listener, contextlib.suppress(KeyboardInterrupt):  # uvicorn ends its work and raises it once more
        server.run(sockets=[listener])
