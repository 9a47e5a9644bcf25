"""`verify FILE...` and `audit FILE`: whether to load a file. Is it what was written, and which code does it ask for?

`verify` exits with 1 if a file is damaged, and with 2 if one could not be checked: it is missing, or no sharedtree
file. `audit` lists the classes and functions that a file names, and which of them it would get, at once or when a
module is imported, which it does not do. It exits with 1 if something is refused.

JSON of `verify`: `files`, each with `file`; `whole`, true or false, or null if it could not be checked; `nbytes` and
`num_arrays`, of a whole file; `damage`, the damaged chunks of 4 MiB, each with `tensor` and `chunk`, from 0; `error`, a
text or null.

JSON of `audit`: `file`; `requests`, each with `name`, `kind` (`"class"`, `"function"` or `"method"`), `paths` (the
first few places), `allowed`, `found` and `why`, a text that is empty if all is well, and `not_imported`, the module
that has to be imported before the file is loaded, or an empty text; `allow_list`, the names to trust if you trust what
is refused.
"""

import argparse
from typing import Any, NamedTuple

from ..core._errors import CorruptFileError, SharedTreeError
from ..core._printing import printable
from ..serialise import audit as audit_of
from ..serialise.load import open_checkpoint
from ._terminal_output import FOUND, OK, TROUBLE, counted, line_writer, message_of, write_error, write_json


class Checked(NamedTuple):
    """What became of one file."""

    file: str
    whole: bool | None
    nbytes: int | None = None
    num_arrays: int | None = None
    damage: tuple[tuple[str, int], ...] = ()
    error: str | None = None


def add_to(commands: Any) -> None:
    """Adds the two commands."""
    _add_verify(commands)
    _add_audit(commands)


def _add_verify(commands: Any) -> None:
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
    """Runs `verify`."""
    results = []
    write = line_writer()
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
    return max(OK if each.whole else TROUBLE if each.whole is None else FOUND for each in results)


def check(file: str) -> Checked:
    """Checks one file. Cost: reads all of it, and holds 4 MiB of it a thread."""
    try:
        with open_checkpoint(file) as found:
            damage = tuple((each.tensor, each.chunk) for each in found.container.find_damage())
            if damage:
                return Checked(file, False, damage=damage, error=_message(file, damage))
            nbytes = sum(tensor.nbytes for tensor in found.container.tensors.values())
            return Checked(file, True, nbytes, len(found.manifest.arrays))
    except CorruptFileError as error:
        damage = () if error.tensor is None or error.chunk is None else ((error.tensor, error.chunk),)
        return Checked(file, False, damage=damage, error=str(error))
    except (SharedTreeError, OSError) as error:
        return Checked(file, None, error=message_of(error))


def _message(file: str, damage: tuple[tuple[str, int], ...]) -> str:
    chunks: dict[str, list[int]] = {}
    for tensor, chunk in damage:
        chunks.setdefault(tensor, []).append(chunk)
    listed = [f"    `{printable(tensor)}`, chunk {', '.join(map(str, found))}" for tensor, found in chunks.items()]
    return "\n".join(
        [
            f"`{printable(file)}` is damaged. What these tensors hold, in chunks of 4 MiB counted from 0, was changed:",
            *listed,
            "Restore the file from a copy, or take what is there:",
            "    sharedtree.load(path, verify=False)",
        ]
    )


def _amount(result: Checked) -> str:
    return f"{counted(result.num_arrays or 0, 'array')}, {result.nbytes or 0:,} bytes"


def _as_json(result: Checked) -> dict[str, Any]:
    damage = [{"tensor": tensor, "chunk": chunk} for tensor, chunk in result.damage]
    return {**result._asdict(), "damage": damage}


def audit(arguments: argparse.Namespace) -> int:
    """Runs `audit`."""
    try:
        found = audit_of(arguments.file, trusted=arguments.trusted)
    except ValueError as error:
        write_error(str(error))  # a malformed name in `--trusted`, or a malformed file
        return TROUBLE
    if arguments.json:
        requests = [{**request._asdict(), "paths": list(request.paths)} for request in found.requests]
        write_json({"file": arguments.file, "requests": requests, "allow_list": list(found.allow_list)})
    else:
        write = line_writer()
        for line in str(found).split("\n"):
            write((line, "bad" if "  REFUSED: " in line else ""))
    return FOUND if found.refused else OK
