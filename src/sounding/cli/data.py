"""`sounding data`: which data sets there are, fetch them, verify them."""

from __future__ import annotations

from typing import Any

import click

from sounding.cli.options import json_option, quiet_option
from sounding.cli.output import console, new_table, print_json, say, telling_download, working
from sounding.data.catalogue import CATALOGUE, Entry, find_entry
from sounding.data.store import data_folder, fetch_entry, file_state
from sounding.encoding import fields_of
from sounding.errors import ExitCode, UsageError

ALL = "all"


@click.group()
def data() -> None:
    """List, download and verify real data sets: the official files, compared with their published checksums.

    The files are kept in the folder that the variable SOUNDING_DATA names, or else in ~/.cache/sounding/data. Every
    command that takes --data fetches what it needs; these commands fetch it beforehand.
    """


@data.command(name="list", short_help="List the data sets: size, licence, and what is here.")
@json_option
def list_(as_json: bool) -> None:
    """List the data sets, their size, licence, and whether they are on this machine.

    Only the sizes of files are looked at; `sounding data verify` compares the checksums.
    """
    # the sums of all files would take minutes to compute
    rows = [_describe(entry, _states(entry, sums=False)) for entry in CATALOGUE.values()]
    if as_json:
        print_json({"folder": str(data_folder()), "data_sets": rows})
        return
    table = new_table("data set", ">samples", ">shape", ">classes", ">on disk", "here", "licence")
    for row in rows:
        train, test = row["samples"]
        shape = "×".join(map(str, row["shape"]))
        megabytes = f"{row['bytes'] / 1e6:.0f} MB"
        here = "yes" if row["state"] == "intact" else "no" if row["state"] == "missing" else row["state"]
        table.add_row(row["name"], f"{train} + {test}", shape, str(row["classes"]), megabytes, here, row["licence"])
    screen = console()
    screen.print(table)
    screen.print(f"\nFolder: {data_folder()}", markup=False, soft_wrap=True)
    screen.print("Without files: digits (embedded), gaussian, gaussian-classes, noise, tokens:VOCABULARY, FILE.npz")


@data.command()
@click.argument("names", nargs=-1)
@json_option
@quiet_option()
def get(names: tuple[str, ...], as_json: bool, quiet: bool) -> None:
    """Download data sets by NAMES, or all of them with "all".

    Files that are here and intact are not fetched again. A broken download goes on where it stopped. A damaged file is
    kept as FILE.corrupt and fetched again.
    """
    entries = _choose(names, what="get")
    fetched: dict[str, list[str]] = {}
    with working("looking", quiet=quiet) as tell:
        for entry in entries:
            fetched[entry.name] = fetch_entry(entry, progress=telling_download(tell))
    if as_json:
        print_json({"folder": str(data_folder()), "fetched": fetched})
        return
    for name, files in fetched.items():
        say(f"{name}: fetched {', '.join(files)}" if files else f"{name}: here and intact")


@data.command(short_help="Compare every file with its published checksum.")
@click.argument("names", nargs=-1)
@json_option
@click.pass_context
def verify(ctx: click.Context, names: tuple[str, ...], as_json: bool) -> None:
    """Compare every file with its published checksum; nothing is changed.

    Without NAMES every data set is compared that has a file on this machine. The exit code is 1 if a file is damaged,
    or if a file of NAMES is missing.
    """
    entries = _choose(names, what="verify") if names else list(CATALOGUE.values())
    found = {entry.name: _states(entry, sums=True) for entry in entries}
    if not names:  # what was never fetched is not missing
        found = {name: states for name, states in found.items() if set(states.values()) != {"missing"}}
    good = all(state == "intact" for states in found.values() for state in states.values())
    if as_json:
        print_json({"folder": str(data_folder()), "intact": good, "data_sets": found})
    else:
        for name, states in found.items():
            for path, state in states.items():
                say(f"{name}/{path}: {state}")
            if set(states.values()) != {"intact"}:
                say(f"          Try sounding data get {name}.", err=True)
        if not found:
            say(f"no data sets in {data_folder()}")
    ctx.exit(ExitCode.HEALTHY if good else ExitCode.UNHEALTHY)


def _choose(names: tuple[str, ...], *, what: str) -> list[Entry]:
    if not names:
        raise UsageError("expected the names of data sets, got none", hint=f"sounding data {what} mnist, or {ALL}")
    if ALL in names:
        return list(CATALOGUE.values())
    return [find_entry(name) for name in dict.fromkeys(names)]  # a name that is given twice counts once


def _states(entry: Entry, *, sums: bool) -> dict[str, str]:
    return {file.path: file_state(file, data_folder() / entry.name, sums=sums) for file in entry.stored}


def _describe(entry: Entry, states: dict[str, str]) -> dict[str, Any]:
    kinds = set(states.values())
    state = kinds.pop() if len(kinds) == 1 else "damaged" if "damaged" in kinds else "incomplete"
    homes = [url for remote in entry.remotes for url in remote.urls]
    told = {"bytes": entry.size, "state": state, **fields_of(entry, "licence citation"), "homes": homes}
    return {**fields_of(entry, "name samples shape classes mean std"), **told}
