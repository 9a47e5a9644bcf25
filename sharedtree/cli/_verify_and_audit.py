"""`verify FILE...` and `audit FILE` help to decide whether to load a file.

`verify` checks that a file is what was written. It exits with 1 if a file is damaged, and with 2 if a file could not be
checked, because it is missing or is no file of sharedtree.

`audit` lists the classes and functions that a file names, and says which of them loading would get. Some need a module
that is not imported yet; `audit` does not import it. It exits with 1 if loading would refuse one of them.

JSON of `verify`: `files`, a list. Each entry has

- `file`;
- `whole`: true or false, or null if the file could not be checked;
- `nbytes` and `num_arrays`, null unless the file is whole;
- `damage`: the damaged chunks of 4 MiB, each with `tensor` and `chunk`, counted from 0;
- `error`: a text or null.

JSON of `audit`:

- `file`;
- `requests`, each with `name`, `kind` (`"class"`, `"function"` or `"method"`), `paths` (the first few places),
  `allowed`, `found`, `why` (a text, empty if all is well) and `not_imported` (the module that has to be imported before
  the file is loaded, or an empty text);
- `allow_list`: the names to trust, if you trust all that is refused.
"""

import argparse
from typing import Any, NamedTuple

from ..core._errors import CorruptFileError, SharedTreeError
from ..core._printing import printable
from ..serialise import audit as audit_of
from ..serialise.load import open_checkpoint
from ._terminal_output import (
    FOUND,
    OK,
    TROUBLE,
    counted,
    line_writer,
    message_of,
    terminal_width,
    write_error,
    write_json,
)


class Checked(NamedTuple):
    """Result of checking one file. The fields are the keys of the JSON, which the docstring of this file explains."""

    file: str
    whole: bool | None
    nbytes: int | None = None
    num_arrays: int | None = None
    damage: tuple[tuple[str, int], ...] = ()
    error: str | None = None


def add_to(commands: Any) -> None:
    """Adds `verify` and `audit` to the subparsers of an argument parser."""
    _add_verify(commands)
    _add_audit(commands)


def _add_verify(commands: Any) -> None:
    """Adds `verify` and its arguments."""
    parser = commands.add_parser(
        "verify",
        help="check that files are what was written",
        description="Reads files, and checks all digests and references in them. "
        "Exit status: 0 if all are whole, 1 if one is damaged, 2 if one could not be checked.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=verify)


def _add_audit(commands: Any) -> None:
    """Adds `audit` and its arguments."""
    parser = commands.add_parser(
        "audit",
        help="list the classes and functions that a file names",
        description="Lists the classes and functions that a file names, which of them it would get, and the "
        "allow-list that it needs. Exit status: 0 if it gets all of them, 1 if something is refused or would come from "
        "where nothing is installed, 2 on trouble.",
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument(
        "--trusted",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="names (my_models:Encoder) and packages (my_models) to allow; they are imported, and from the current "
        "directory only if it is in PYTHONPATH",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=audit)


def verify(arguments: argparse.Namespace) -> int:
    """Runs `verify`, and returns the exit status."""
    results = []
    write = line_writer()
    # Text is written after each file, so that it can be read while the next one is checked. JSON comes at the end.
    for file in arguments.files:
        result = check(file)
        results.append(result)
        if arguments.json:
            continue
        if result.error is not None:
            write_error(result.error)
        else:
            write((file, "path"), (": ", ""), ("whole", "good"), (f", {_amount(result)}", ""))
    if arguments.json:
        write_json({"files": [_as_json(result) for result in results]})
    # The worst status of all files.
    return max(OK if result.whole else TROUBLE if result.whole is None else FOUND for result in results)


def check(file: str) -> Checked:
    """Checks one file, and returns the result. Errors of the file are part of the result and are not raised.

    Cost: reads all of the file. Each thread holds 4 MiB of it at a time.
    """
    try:
        with open_checkpoint(file) as saved:
            damage = tuple((chunk.tensor, chunk.chunk) for chunk in saved.container.find_damage())
            if damage:
                return Checked(file, whole=False, damage=damage, error=_message(file, damage))
            nbytes = sum(tensor.nbytes for tensor in saved.container.tensors.values())
            return Checked(file, whole=True, nbytes=nbytes, num_arrays=len(saved.manifest.arrays))
    # The header itself is damaged, or refers to something that is not there.
    except CorruptFileError as error:
        damage = () if error.tensor is None or error.chunk is None else ((error.tensor, error.chunk),)
        return Checked(file, whole=False, damage=damage, error=str(error))
    except (SharedTreeError, OSError) as error:
        return Checked(file, whole=None, error=message_of(error))


def _message(file: str, damage: tuple[tuple[str, int], ...]) -> str:
    """Returns the message for a damaged file.

    Args:
        file: path of the file.
        damage: tensor and index of each damaged chunk.
    """
    # Tensor → its damaged chunks.
    chunks: dict[str, list[int]] = {}
    for tensor, chunk in damage:
        chunks.setdefault(tensor, []).append(chunk)
    listed: list[str] = []
    for tensor, indices in chunks.items():
        listed.append(f"    `{printable(tensor)}`, chunk {', '.join(map(str, indices))}")
    return "\n".join(
        [
            f"`{printable(file)}` is damaged. What these tensors hold, in chunks of 4 MiB counted from 0, was changed:",
            *listed,
            "Restore the file from a copy, or take what is there:",
            "    sharedtree.load(path, verify=False)",
        ]
    )


def _amount(result: Checked) -> str:
    """Returns the amount of data in a whole file, in words."""
    return f"{counted(result.num_arrays or 0, 'array')}, {result.nbytes or 0:,} bytes"


def _as_json(result: Checked) -> dict[str, Any]:
    """Returns the entry of a file in the JSON of `verify`."""
    damage = [{"tensor": tensor, "chunk": chunk} for tensor, chunk in result.damage]
    return {**result._asdict(), "damage": damage}


def audit(arguments: argparse.Namespace) -> int:
    """Runs `audit`. Returns `FOUND` if `load` would refuse a name, `TROUBLE` for a malformed file, else `OK`."""
    # ValueError is raised for a malformed name in `--trusted` and for a malformed file. `guarded` reports OSErrors.
    try:
        report = audit_of(arguments.file, trusted=arguments.trusted)
    except ValueError as error:
        write_error(str(error))
        return TROUBLE
    if arguments.json:
        requests = [{**request._asdict(), "paths": list(request.paths)} for request in report.requests]
        write_json({"file": arguments.file, "requests": requests, "allow_list": list(report.allow_list)})
    else:
        # The report prints as text. Its lines for refused names are coloured.
        write = line_writer()
        width = terminal_width()
        lines = str(report).split("\n")
        # The first line is a sentence. The head of the table and a line for each name follow.
        table = slice(1, len(report.requests) + 2)
        if width is not None and report.requests:
            lines[table] = _without_long_places(lines[table], width)
        for line in lines:
            write((line, "bad" if "  REFUSED: " in line else ""))
    return FOUND if report.refused else OK


def _without_long_places(rows: list[str], width: int) -> list[str]:
    """Cuts the last column of a report, the places, where a row is wider than a terminal. Verdicts are never cut.

    Args:
        rows: the head of the table and its rows.
        width: most characters of a line.
    """
    start = rows[0].rindex("where")
    room = width - start
    if room < _LEAST_PLACE:
        return [row[:start].rstrip() for row in rows]
    return [row if len(row) <= width else f"{row[: width - 4]} ..." for row in rows]


# A column of places that is narrower than this, in characters, says nothing.
_LEAST_PLACE = 16
