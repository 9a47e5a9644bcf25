"""`show FILE` and `draw FILE -o m.svg`: what a file holds, as a table or as a picture, each tie marked.

`show` is the table that `sharedtree.summary` makes of a model. With `--values` it is the tree instead, in which what is
static in the model has its lines, and numbers theirs. Of long metadata the beginning is shown. `draw` is the picture
that `sharedtree.draw` makes. It needs igraph and drawsvg, and nothing that the file names.

JSON of `show`: `file`; `file_nbytes`; `library`, who wrote it; `metadata`, an object of texts; `nbytes`, of all arrays;
`arrays`, each with `name`, `dtype`, `shape`, `nbytes` and `kind` (`"jax"`, `"numpy"` or `"key"`); `tree`, the lines
from the root down, each with `depth`, `step`, `path`, `text`, `nbytes` (of what comes first there, and below) and
`tied_to` (the path where the same object came first, or null); `num_lines`, how many there are in all to this depth: of
more than `--lines` only the first are in `tree`.

A safetensors file of another program has no tree. Its tensors are listed, with the dtypes that the file says; in JSON
`library` and each `kind` are null, and `tree` is empty.
"""

import argparse
import contextlib
import itertools
import os
import shutil
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ..core._printing import printable
from ..serialise import Inspection
from ..serialise.container._byte_sources import Source, open_source
from ..serialise.container._header import is_foreign, read_header
from ..serialise.inspect_and_audit import MAX_LINES, ArrayInfo, inspection_of, metadata_lines
from ..serialise.load import open_checkpoint
from ..serialise.values._nodes import Manifest
from ..serialise.values._paths import Line, columns, indent
from ..show._drawing import drawing_of, libraries
from ..show._drawing_layout import MOST_BOXES
from ..show._outline import Outline
from ..show._saved_models import description_of_file
from ..show._tables import table_lines
from ._terminal_output import OK, TROUBLE, counted, line_writer, write_error, write_json


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
    """Adds the two commands."""
    _add_show(commands)
    _add_draw(commands)


def _add_show(commands: Any) -> None:
    summary = "show what a file holds, with ties marked"
    parser = commands.add_parser(
        "show",
        help=summary,
        description="Shows the model that a file holds, as sharedtree.summary shows a live one, or the tensors of a "
        "safetensors file of another program. Its header is read, its arrays are not.",
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--depth", type=number, metavar="N", help="show this many levels below the root")
    parser.add_argument(
        "--lines", type=number, default=MAX_LINES, metavar="N", help=f"show at most N lines (default: {MAX_LINES:,})"
    )
    parser.add_argument(
        "--values", action="store_true", help="show all of the tree, numbers, texts and functions included"
    )
    parser.add_argument("--arrays", action="store_true", help="show a table of the arrays instead of the tree")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=show)


def _add_draw(commands: Any) -> None:
    summary = "draw what a file holds as SVG, with ties marked"
    parser = commands.add_parser(
        "draw",
        help=summary,
        description="Draws the model that a file holds, as sharedtree.draw draws a live one: modules are boxes, fields "
        "are wires, and what is tied is one box. Its header is read, its arrays are not. Needs igraph and drawsvg.",
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("-o", "--output", metavar="SVG", help="where to write it (default: standard output)")
    parser.add_argument("--depth", type=number, metavar="N", help="draw this many levels below the root")
    parser.add_argument(
        "--boxes", type=number, default=MOST_BOXES, metavar="N", help=f"draw at most N boxes (default: {MOST_BOXES})"
    )
    parser.set_defaults(run=draw)


def show(arguments: argparse.Namespace) -> int:
    """Runs `show`."""
    # A pipe can be opened only once, so all that is shown comes from this source.
    with contextlib.closing(open_source(arguments.file)) as source:
        found, manifest = _inspected(source)
        file_nbytes = source.size
    lines = Sizes(found.lines, arguments.depth)
    if arguments.json:
        write_json(_as_json(arguments.file, file_nbytes, found, lines, arguments.lines))
        return OK
    write = line_writer()
    by = f"written by {found.library}" if found.library else "which another program wrote: it has tensors, and no tree"
    write((arguments.file, "path"), (f"  {file_nbytes:,} bytes, {by}", ""))
    write((f"{counted(len(found.arrays), 'array')}, {found.nbytes:,} bytes", ""))
    if lines.num_ties:
        write((f"{counted(lines.num_ties, 'place')} tied to an earlier one", "tie"))
    for key, value in metadata_lines(found.metadata):
        write((key, "dim"), (value, ""))
    write()
    if arguments.arrays or manifest is None:
        rows = [(a.name, a.dtype, str(list(a.shape)), f"{a.nbytes:,}", a.kind or "") for a in found.arrays]
        rows = [tuple(map(printable, row)) for row in rows]
        for text in columns([("name", "dtype", "shape", "bytes", "kind" if manifest is not None else ""), *rows]):
            write((text, ""))
        return OK
    if not arguments.values:
        _write_table(arguments, manifest, write)
        return OK
    for line, nbytes, is_cut in itertools.islice(lines, arguments.lines):
        parts = [(indent(line.depth), ""), (line.step, "path"), ("  " if line.step else "", "")]
        parts.append((line.what, "tie" if line.tied_to is not None else ""))
        write(*parts, (f"  {nbytes:,} bytes" if nbytes else "", "dim"), ("  ..." if is_cut else "", "dim"))
    if len(lines) > arguments.lines:
        more = counted(len(lines) - arguments.lines, "more line")
        write((f"... and {more}; see --lines and --depth", "dim"))
    return OK


def _write_table(arguments: argparse.Namespace, manifest: Manifest, write: Callable[..., None]) -> None:
    outline = Outline(description_of_file(manifest))
    width = shutil.get_terminal_size((_WIDTH, 24)).columns if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH
    for line in table_lines(outline, depth=arguments.depth, most=arguments.lines, width=width, how=_HOW):
        write(*line)


_WIDTH = 120
_HOW = "--lines and --depth"


def _inspected(source: Source) -> tuple[Inspection, Manifest | None]:
    """What a file holds, and its tree; of one that another program wrote, without a library, lines, and a tree."""
    if not is_foreign(source):
        with open_checkpoint(source) as file:
            return inspection_of(file), file.manifest
    header = read_header(source, foreign=True)
    arrays = tuple([ArrayInfo(each.name, each.dtype, each.shape, each.nbytes, "") for each in header.tensors])
    return Inspection("", header.metadata, arrays, (), sum(array.nbytes for array in arrays)), None


class Sizes:
    """The lines of a whole tree up to a depth, each with the size of all below it.

    Args:
        lines: from the root down; they are iterated over anew each time that this is.
        depth: default: any.

    Attributes:
        num_ties: how many lines of the whole tree are ties.

    Cost: two looks at each line, and 16 bytes for each.
    """

    def __init__(self, lines: Iterable[Line], depth: int | None = None) -> None:
        self._lines, self._depth = lines, depth
        self.num_ties = 0
        self._depths, self._nbytes = array("q"), array("q")
        for line in lines:
            self.num_ties += line.tied_to is not None
            self._depths.append(line.depth)
            self._nbytes.append(line.nbytes or 0)
        below: dict[int, int] = {}  # depth → bytes of the lines of that depth whose parent was not met yet
        for i in range(len(self._depths) - 1, -1, -1):
            at = self._depths[i]
            self._nbytes[i] += below.pop(at + 1, 0)
            below[at] = below.get(at, 0) + self._nbytes[i]

    def __len__(self) -> int:
        return len(self._depths) if self._depth is None else sum(at <= self._depth for at in self._depths)

    def __iter__(self) -> Iterator[Sized]:
        for i, line in enumerate(self._lines):
            if self._depth is None or line.depth <= self._depth:
                is_cut = line.depth == self._depth and self._depths[i + 1 : i + 2] > array("q", [line.depth])
                yield Sized(line, self._nbytes[i], is_cut)


def _as_json(file: str, file_nbytes: int, found: Inspection, lines: Sizes, most: int) -> dict[str, Any]:
    return {
        "file": file,
        "file_nbytes": file_nbytes,
        "library": found.library or None,
        "metadata": found.metadata,
        "nbytes": found.nbytes,
        "arrays": [
            {**array._asdict(), "shape": list(array.shape), "kind": array.kind or None} for array in found.arrays
        ],
        "tree": [{**each.line._asdict(), "nbytes": each.nbytes} for each in itertools.islice(lines, most)],
        "num_lines": len(lines),
    }


def number(text: str) -> int:
    """An argument that is a number, from 0 on."""
    found = int(text)
    if found < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {found}")
    return found


def draw(arguments: argparse.Namespace) -> int:
    """Runs `draw`."""
    try:
        igraph, drawsvg = libraries()
    except ImportError as error:
        write_error(str(error))
        return TROUBLE
    with open_checkpoint(arguments.file) as file:
        outline = Outline(description_of_file(file.manifest))
    drawing = drawing_of(outline, arguments.depth, max(arguments.boxes, 1), igraph, drawsvg)
    if arguments.output is None or arguments.output == "-":
        sys.stdout.write(drawing.svg)
        return OK
    try:
        drawing.save(arguments.output)
    except ValueError as error:
        write_error(str(error))
        return TROUBLE
    line_writer()((printable(arguments.output), "path"), (f"  {counted(len(drawing.svg), 'byte')}", "dim"))
    return OK
