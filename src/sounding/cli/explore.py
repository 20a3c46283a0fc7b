"""`sounding explore`: a local web page to feel the theory."""

from __future__ import annotations

import socket
import threading
import webbrowser

import click

from sounding.cli.output import say
from sounding.errors import UsageError


@click.command()
@click.option("--port", type=click.IntRange(min=0, max=65535), default=8765, metavar="N",
              help="Where the page is served on this machine; 0 takes a free one.")  # fmt: skip
@click.option("--no-browser", is_flag=True, help="Do not open a browser, only print the address.")
def explore(port: int, no_browser: bool) -> None:
    """Choose an activation, a norm, a depth and see what theory says of such networks while you move.

    The page is served to this machine only and loads nothing from elsewhere. Ctrl-C ends it. It needs the extra
    `explore`: pip install 'sounding[explore]'.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError:
        raise UsageError(
            "the explorer needs starlette and uvicorn, which are not installed", hint="pip install 'sounding[explore]'"
        ) from None
    from sounding.explore.app import make_app

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        raise UsageError(f"port {port} of this machine cannot be used: {error.strerror}", hint="--port 0") from None
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    say(f"The explorer is at {address} (Ctrl-C ends it).")
    if not no_browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    server = uvicorn.Server(uvicorn.Config(make_app(), log_level="warning", access_log=False, server_header=False))
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn ends its work and raises it once more
        pass
    finally:
        listener.close()
