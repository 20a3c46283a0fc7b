"""`python -m sounding` is the command line."""

from sounding.cli import main

main()
