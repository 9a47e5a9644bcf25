"""`show FILE`: what a file holds, as a tree in which what is tied is marked, each part with its size.

JSON: `file`; `file_nbytes`; `library`, who wrote it; `metadata`, an object of texts; `nbytes`, of all arrays;
`arrays`, each with `name`, `dtype`, `shape`, `nbytes` and `kind` (`"jax"`, `"numpy"` or `"key"`); `tree`, the lines
from the root down, each with `depth`, `step`, `path`, `text`, `nbytes` (of what comes first there, and below) and
`tied_to` (the path where the same object came first, or null).
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..serialise import Inspection, inspect
from ..serialise._outline import Line, indent
from ._output import OK, columns, counted, line_writer, write_json


class Sized(NamedTuple):
    """A line, and what belongs to it.

    Attributes:
        line: the line.
        nbytes: of the arrays that come first there or below.
        is_cut: whether there are lines below that are not shown.
    """

    line: Line
    nbytes: int
    is_cut: bool


def add_to(commands: Any) -> None:
    """Adds the command."""
    summary = "show what a file holds, with ties marked"
    parser = commands.add_parser(
        "show", help=summary, description="Shows the tree that a file holds. Its header is read, its arrays are not."
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--depth", type=_depth, metavar="N", help="show this many levels below the root")
    parser.add_argument("--arrays", action="store_true", help="show a table of the arrays instead of the tree")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it."""
    found = inspect(arguments.file)
    file_nbytes = os.path.getsize(arguments.file)
    lines = sized(found.lines, arguments.depth)
    if arguments.json:
        write_json(_as_json(arguments.file, file_nbytes, found, lines))
        return OK
    write = line_writer()
    write((arguments.file, "path"), (f"  {file_nbytes:,} bytes, written by {found.library}", ""))
    ties = sum(line.tied_to is not None for line in found.lines)
    write((f"{counted(len(found.arrays), 'array')}, {found.nbytes:,} bytes", ""))
    if ties:
        write((f"{counted(ties, 'place')} tied to an earlier one", "tie"))
    for key, value in found.metadata.items():
        write((f"{key}: ", "dim"), (value, ""))
    write()
    if arguments.arrays:
        rows = [(a.name, a.dtype, str(list(a.shape)), f"{a.nbytes:,}", a.kind) for a in found.arrays]
        for text in columns([("name", "dtype", "shape", "bytes", "kind"), *rows]):
            write((text, ""))
        return OK
    for line, nbytes, is_cut in lines:
        parts = [(indent(line.depth), ""), (line.step, "path"), ("  " if line.step else "", "")]
        parts.append((line.what, "tie" if line.tied_to is not None else ""))
        write(*parts, (f"  {nbytes:,} bytes" if nbytes else "", "dim"), ("  ..." if is_cut else "", "dim"))
    return OK


def sized(lines: Sequence[Line], depth: int | None = None) -> list[Sized]:
    """The lines up to a depth, each with the size of all below it.

    Args:
        lines: of a whole tree, from the root down.
        depth: default: any.

    Cost: one look at each line.
    """
    below: dict[int, int] = {}  # depth → bytes of the lines of that depth whose parent was not met yet
    result: list[Sized] = []
    for i in range(len(lines) - 1, -1, -1):
        line = lines[i]
        nbytes = (line.nbytes or 0) + below.pop(line.depth + 1, 0)
        below[line.depth] = below.get(line.depth, 0) + nbytes
        if depth is None or line.depth <= depth:
            is_cut = line.depth == depth and i + 1 < len(lines) and lines[i + 1].depth > line.depth
            result.append(Sized(line, nbytes, is_cut))
    return result[::-1]


def _as_json(file: str, file_nbytes: int, found: Inspection, lines: Sequence[Sized]) -> dict[str, Any]:
    return {
        "file": file,
        "file_nbytes": file_nbytes,
        "library": found.library,
        "metadata": found.metadata,
        "nbytes": found.nbytes,
        "arrays": [{**array._asdict(), "shape": list(array.shape)} for array in found.arrays],
        "tree": [{**each.line._asdict(), "nbytes": each.nbytes} for each in lines],
    }


def _depth(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {number}")
    return number
