"""`verify FILE...`: whether files are what was written, and where they are not.

The exit status is 1 if a file is damaged, and 2 if one could not be checked: it is missing, or no sharedtree file.

JSON: `files`, each with `file`; `whole`, true or false, or null if it could not be checked; `nbytes` and `num_arrays`,
of a whole file; `damage`, the damaged chunks of 4 MiB, each with `tensor` and `chunk`, from 0; `error`, a text or null.
"""

import argparse
from typing import Any, NamedTuple

from .._printable import printable
from ..errors import CorruptFileError, SharedTreeError
from ..serialise.load import opened
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
    """Adds the command."""
    parser = commands.add_parser(
        "verify",
        help="check that files are what was written",
        description="Reads files, and checks all digests and references in them. "
        "Exit status: 0 if all are whole, 1 if one is damaged, 2 if one could not be checked.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it."""
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
        with opened(file) as found:
            damage = tuple((each.tensor, each.chunk) for each in found.container.damage())
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
