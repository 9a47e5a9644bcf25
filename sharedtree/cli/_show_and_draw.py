"""`show FILE` and `draw FILE -o m.svg`: the content of a file as a table or a picture, with each tie marked.

`show` prints the table that `sharedtree.summary` makes of a live model. With `--values` it prints the whole tree
instead, with lines for static values and numbers, too. Only the beginning of long metadata is shown. `draw` makes the
picture that `sharedtree.draw` makes of a live model. It needs igraph and drawsvg. Neither command imports anything that
the file names.

JSON of `show`:

- `file`, `file_nbytes`;
- `library`, which wrote the file;
- `metadata`, an object of texts;
- `nbytes`, of all arrays together;
- `arrays`, each with `name`, `dtype`, `shape`, `nbytes` and `kind` (`"jax"`, `"numpy"` or `"key"`);
- `tree`, the lines from the root down, at most as many as `--lines`. Each has `depth`, `step`, `path`, `text`, `nbytes`
  (of the arrays with their first place there or below) and `tied_to` (the path of the first place of the same object,
  or null);
- `num_lines`, the number of all lines down to the chosen depth.

A safetensors file of another program has no tree. Its tensors are listed, with the dtypes that the file says. In JSON
`library` and each `kind` are null, and `tree` is empty.
"""

import argparse
import contextlib
import itertools
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
from ._terminal_output import OK, TROUBLE, counted, line_writer, terminal_width, write_error, write_json


class SizedLine(NamedTuple):
    """Line of a tree with its size.

    Attributes:
        line: the line.
        nbytes: bytes of the arrays with their first place in this line or below it.
        is_cut: True if lines below it are hidden.
    """

    line: Line
    nbytes: int
    is_cut: bool


def add_to(commands: Any) -> None:
    """Adds `show` and `draw` to the subparsers of an argument parser."""
    _add_show(commands)
    _add_draw(commands)


def _add_show(commands: Any) -> None:
    """Adds `show` and its arguments."""
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
        "--lines",
        type=number,
        default=MAX_LINES,
        metavar="N",
        help=f"show at most N lines (default: {MAX_LINES:,})",
    )
    parser.add_argument(
        "--values", action="store_true", help="show all of the tree, numbers, texts and functions included"
    )
    parser.add_argument("--arrays", action="store_true", help="show a table of the arrays instead of the tree")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=show)


def _add_draw(commands: Any) -> None:
    """Adds `draw` and its arguments."""
    summary = "draw what a file holds as SVG, with ties marked"
    parser = commands.add_parser(
        "draw",
        help=summary,
        description="Draws the model that a file holds, as sharedtree.draw draws a live one: modules are boxes, fields "
        "are wires, and what is tied is one box. Its header is read, its arrays are not. Needs igraph and drawsvg.",
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument(
        "-o",
        "--output",
        metavar="SVG",
        help="where to write it (default: standard output, which must not be a terminal; - for that)",
    )
    parser.add_argument("--depth", type=number, metavar="N", help="draw this many levels below the root")
    parser.add_argument(
        "--boxes",
        type=number,
        default=None,
        metavar="N",
        help=f"draw at most N boxes (default: {MOST_BOXES}, or fewer if that is too wide)",
    )
    parser.set_defaults(run=draw)


def show(arguments: argparse.Namespace) -> int:
    """Runs `show`, and returns the exit status."""
    # A pipe can be opened only once, so everything is read from this one source.
    with contextlib.closing(open_source(arguments.file)) as source:
        inspection, manifest = _inspect(source)
        file_nbytes = source.size
    lines = SizedLines(inspection.lines, arguments.depth)
    if arguments.json:
        write_json(_as_json(arguments.file, file_nbytes, inspection, lines, arguments.lines))
        return OK
    write = line_writer()
    _write_head(arguments.file, file_nbytes, inspection, lines.num_ties, write)
    # The arrays, the tree with all values, or the table.
    if arguments.arrays or manifest is None:
        _write_arrays(inspection, has_kinds=manifest is not None, write=write)
    elif arguments.values:
        _write_tree(lines, arguments.lines, write)
    else:
        _write_table(arguments, manifest, write)
    return OK


def _write_head(file: str, file_nbytes: int, inspection: Inspection, num_ties: int, write: Callable[..., None]) -> None:
    """Writes the lines above the table, and an empty line.

    Args:
        file: path of the file.
        file_nbytes: its size.
        inspection: its content.
        num_ties: number of places tied to an earlier one.
        write: writes one line, see `line_writer`.
    """
    by = f"written by {inspection.library}" if inspection.library else _BY_ANOTHER_PROGRAM
    write((file, "path"), (f"  {file_nbytes:,} bytes, {by}", ""))
    write((f"{counted(len(inspection.arrays), 'array')}, {inspection.nbytes:,} bytes", ""))
    if num_ties:
        write((f"{counted(num_ties, 'place')} tied to an earlier one", "tie"))
    for key, value in metadata_lines(inspection.metadata):
        write((key, "dim"), (value, ""))
    write()


_BY_ANOTHER_PROGRAM = "which another program wrote: it has tensors, and no tree"


def _write_arrays(inspection: Inspection, *, has_kinds: bool, write: Callable[..., None]) -> None:
    """Writes a table of the arrays. Their kinds are unknown in a file of another program."""
    rows = [(a.name, a.dtype, str(list(a.shape)), f"{a.nbytes:,}", a.kind or "") for a in inspection.arrays]
    rows = [tuple(map(printable, row)) for row in rows]
    for text in columns([("name", "dtype", "shape", "bytes", "kind" if has_kinds else ""), *rows]):
        write((text, ""))


def _write_tree(lines: "SizedLines", most: int, write: Callable[..., None]) -> None:
    """Writes the whole tree, with static values and numbers, but at most `most` lines."""
    for line, nbytes, is_cut in itertools.islice(lines, most):
        texts = [(indent(line.depth), ""), (line.step, "path"), ("  " if line.step else "", "")]
        texts.append((line.what, "tie" if line.tied_to is not None else ""))
        write(*texts, (f"  {nbytes:,} bytes" if nbytes else "", "dim"), ("  ..." if is_cut else "", "dim"))
    if len(lines) > most:
        num_hidden = counted(len(lines) - most, "more line")
        write((f"... and {num_hidden}; see --lines and --depth", "dim"))


def _write_table(arguments: argparse.Namespace, manifest: Manifest, write: Callable[..., None]) -> None:
    """Writes the table of `sharedtree.summary`, as wide as the terminal."""
    outline = Outline(description_of_file(manifest))
    # Redirected output has the same width everywhere.
    width = terminal_width() or _WIDTH
    for line in table_lines(outline, depth=arguments.depth, most=arguments.lines, width=width, how=_OPTIONS):
        write(*line)


_WIDTH = 120
_OPTIONS = "--lines and --depth"


def _inspect(source: Source) -> tuple[Inspection, Manifest | None]:
    """Reads the header of a file.

    Returns:
        The content of the file, and its manifest: the header's description of the tree. In a file of another program,
        the content is only tensors and metadata, and the manifest is None.
    """
    if not is_foreign(source):
        with open_checkpoint(source) as file:
            return inspection_of(file), file.manifest
    header = read_header(source, foreign=True)
    arrays = tuple([ArrayInfo(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, "") for tensor in header.tensors])
    nbytes = sum(array.nbytes for array in arrays)
    return Inspection(library="", metadata=header.metadata, arrays=arrays, lines=(), nbytes=nbytes), None


class SizedLines:
    """Lines of a tree down to a depth, each with the size of everything below it.

    Args:
        lines: the lines of the whole tree, from the root down. They are iterated over once, and once more for each
            iteration over this object.
        depth: number of levels below the root. None for all.

    Attributes:
        num_ties: number of lines of the whole tree tied to an earlier one.

    Cost: two passes over the lines, and 16 bytes for each.
    """

    def __init__(self, lines: Iterable[Line], depth: int | None = None) -> None:
        """Reads the lines once, and computes their sizes."""
        self._lines, self._depth = lines, depth
        self.num_ties = 0
        # Depth and size of each line, in 8 bytes each. A file can have millions of lines.
        self._depths, self._nbytes = array("q"), array("q")
        for line in lines:
            self.num_ties += line.tied_to is not None
            self._depths.append(line.depth)
            self._nbytes.append(line.nbytes or 0)
        # From the last line to the first, each line takes the sizes of its children, which come after it.
        # Depth → bytes of the lines of that depth whose parent has not been reached yet.
        waiting: dict[int, int] = {}
        for i in range(len(self._depths) - 1, -1, -1):
            line_depth = self._depths[i]
            self._nbytes[i] += waiting.pop(line_depth + 1, 0)
            waiting[line_depth] = waiting.get(line_depth, 0) + self._nbytes[i]

    def __len__(self) -> int:
        if self._depth is None:
            return len(self._depths)
        return sum(line_depth <= self._depth for line_depth in self._depths)

    def __iter__(self) -> Iterator[SizedLine]:
        for i, line in enumerate(self._lines):
            if self._depth is None or line.depth <= self._depth:
                # The next line, if there is one, is a child of this one if it is deeper.
                is_cut = line.depth == self._depth and self._depths[i + 1 : i + 2] > array("q", [line.depth])
                yield SizedLine(line, self._nbytes[i], is_cut)


def _as_json(file: str, file_nbytes: int, inspection: Inspection, lines: SizedLines, most: int) -> dict[str, Any]:
    """Returns the JSON object of `show`, whose keys the docstring of this file explains.

    Args:
        file: path of the file.
        file_nbytes: its size.
        inspection: its content.
        lines: the lines of its tree.
        most: most lines in `tree`.
    """
    arrays = [
        {**array._asdict(), "shape": list(array.shape), "kind": array.kind or None} for array in inspection.arrays
    ]
    tree = [{**sized.line._asdict(), "nbytes": sized.nbytes} for sized in itertools.islice(lines, most)]
    return {
        "file": file,
        "file_nbytes": file_nbytes,
        "library": inspection.library or None,
        "metadata": inspection.metadata,
        "nbytes": inspection.nbytes,
        "arrays": arrays,
        "tree": tree,
        "num_lines": len(lines),
    }


# argparse prints the name of this function if the text is no integer: "invalid number value: 'x'".
def number(text: str) -> int:
    """Converts an argument to an integer.

    Raises:
        ArgumentTypeError: if it is below 0.
        ValueError: if the text is no integer.
    """
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {value}")
    return value


def draw(arguments: argparse.Namespace) -> int:
    """Runs `draw`, and returns the exit status."""
    # Thousands of bytes of SVG would fill the terminal, and nobody could see the picture.
    if arguments.output is None and _is_terminal():
        file = printable(arguments.file)
        write_error(
            "A drawing is SVG, which a terminal does not show. Say where to write it:\n"
            f"    sharedtree draw {file} -o m.svg"
        )
        return TROUBLE
    # `libraries` raises ImportError with the command that installs igraph and drawsvg.
    try:
        igraph, drawsvg = libraries()
    except ImportError as error:
        write_error(str(error))
        return TROUBLE
    with open_checkpoint(arguments.file) as file:
        outline = Outline(description_of_file(file.manifest))
    most = None if arguments.boxes is None else max(arguments.boxes, 1)
    drawing = drawing_of(outline, arguments.depth, most, igraph, drawsvg)
    if arguments.output is None or arguments.output == "-":
        sys.stdout.write(drawing.svg)
        return OK
    # `save` raises ValueError if the path ends in the name of another format, such as `.png`.
    try:
        drawing.save(arguments.output)
    except ValueError as error:
        write_error(str(error))
        return TROUBLE
    line_writer()((printable(arguments.output), "path"), (f"  {counted(len(drawing.svg), 'byte')}", "dim"))
    return OK


def _is_terminal() -> bool:
    """Returns True if standard output is a terminal."""
    return sys.stdout.isatty()
