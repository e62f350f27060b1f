"""`korch database`: the records of measured kernels, as files for other machines of the same kind."""

from __future__ import annotations

import argparse
import json
import math
from datetime import UTC, datetime
from pathlib import Path

from korch.cli.arrays import writing
from korch.errors import OptionError
from korch.options import Options, default_cache_folder
from korch.system.files import check_output


def add_database(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command with its actions."""
    parser = commands.add_parser("database", help="show, copy or shorten the records of measured kernels")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, text, command in (
        ("stats", "print what there is for each kind of machine, and how it differs from this one", stats),
        ("export", "write all records to a file", export),
        ("import", "add the records of files; those that are known stay as they are", import_files),
        ("merge", "write the records of files to one file", merge),
        ("prune", "remove old records", prune),
    ):
        action = actions.add_parser(name, help=text)
        if name in ("import", "merge"):
            action.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what `export` or `merge` wrote")
        if name == "export":
            action.add_argument("output", type=Path, metavar="FILE", help="the file to write")
        if name == "merge":
            action.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")
        if name == "prune":
            action.add_argument("--days", type=float, metavar="N", help="remove records older than N days")
            action.add_argument(
                "--megabytes", type=float, metavar="N", help="remove the oldest records until N are left"
            )
        if name == "stats":
            action.add_argument("--json", action="store_true", help="print JSON")
        if name != "merge":
            action.add_argument("--cache-folder", type=Path, default=default_cache_folder(), metavar="PATH")
        action.set_defaults(command=command)


def stats(parsed: argparse.Namespace) -> int:
    """Print what the database has for each target."""
    from korch.measure import exchange
    from korch.measure.compiler import target_of
    from korch.records import plain

    here = plain(target_of(Options()))
    found = exchange.stats(parsed.cache_folder)
    if parsed.json:
        print(json.dumps([{**plain(one), "differences": one.differences(here)} for one in found], indent=1))
        return 0
    for one in found:
        first, last = (datetime.fromtimestamp(at_s, UTC).date().isoformat() for at_s in (one.first_s, one.last_s))
        is_cuda = "arch" in one.fields
        name = f"{one.fields.get('cpu', 'unknown CPU')}, {one.fields.get('isa', '?')}"
        name = f"{one.fields['name']}, sm_{one.fields['arch']}" if is_cuda else name
        print(f"{one.target}: {name}: {one.records} records and {one.facts} facts, {first} to {last}")
        use = f"--target 'cuda:{one.fields['name']}': {', '.join(one.fields['versions'])}" if is_cuda else ""
        print("  " + (use or "; ".join(one.differences(here)) or ("used here" if one.fields else "not described")))
    print(f"{sum(one.records for one in found)} records")
    return 0


def export(parsed: argparse.Namespace) -> int:
    """Write the database to a file."""
    from korch.measure.exchange import export_to

    check_output(parsed.output, "FILE", [*parsed.cache_folder.glob("kernels-*")])
    with writing(parsed.output, "FILE"):
        print(f"{parsed.output}: {export_to(parsed.cache_folder, parsed.output)} entries")
    return 0


def import_files(parsed: argparse.Namespace) -> int:
    """Add the entries of files to the database."""
    from korch.measure.exchange import import_from

    added, total = import_from(parsed.cache_folder, parsed.files)
    print(f"{added} of {total} entries were added; `korch database stats` says which this machine uses")
    return 0


def merge(parsed: argparse.Namespace) -> int:
    """Write the entries of files to one file."""
    from korch.measure.exchange import export_to, import_from
    from korch.system.scratch import scratch_folder

    check_output(parsed.output, "--output")
    with scratch_folder() as folder, writing(parsed.output, "option --output"):
        import_from(folder, parsed.files)
        print(f"{parsed.output}: {export_to(folder, parsed.output)} entries")
    return 0


def prune(parsed: argparse.Namespace) -> int:
    """Remove old entries."""
    from korch.measure.exchange import prune as remove

    for name, value in (("--days", parsed.days), ("--megabytes", parsed.megabytes)):
        if value is not None and not 0 <= value < math.inf:
            raise OptionError(f"the value is {value}", f"option {name}", "a number that is not negative")
    if parsed.days is None and parsed.megabytes is None:
        raise OptionError("nothing says what is old", "korch database prune", "--days N or --megabytes N")
    most = None if parsed.megabytes is None else int(1e6 * parsed.megabytes)
    print(f"{remove(parsed.cache_folder, parsed.days, most)} entries were removed")
    return 0
