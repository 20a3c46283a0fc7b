"""`sounding completion`: the script that makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from sounding.cli.output import say

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_SOUNDING_COMPLETE"  # by which the script asks the program, as click names it


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a script that completes commands, options, their values and files.

    Name the shell that you type in. Add its line below to the file behind it, and open a new shell. The command
    `sounding` must be on the path.

    \b
    eval "$(sounding completion bash)"        # ~/.bashrc, with bash 4.4 or newer
    eval "$(sounding completion zsh)"         # ~/.zshrc, below the line that calls compinit
    sounding completion fish | source         # ~/.config/fish/config.fish
    """
    from sounding.cli import cli

    kind = get_completion_class(shell)
    # click knows the three shells that the option lets pass
    assert kind is not None
    # the script alone: click would start bash first, to see how old it is
    made = kind(cli, {}, "sounding", VARIABLE)
    say(made.source_template % made.source_vars())
