"""`draw FILE -o m.svg`: the model in a file as a picture, in which every tie is seen.

Needs igraph and drawsvg, and nothing that the file names.
"""

import argparse
import sys
from typing import Any

from .._printable import printable
from ..serialise.load import opened
from ..show._boxes import MOST_BOXES
from ..show._drawing import drawing_of, libraries
from ..show._outline import Outline
from ..show._saved_models import description_of_file
from ._show_and_draw import number
from ._terminal_output import OK, TROUBLE, counted, line_writer, write_error


def add_to(commands: Any) -> None:
    """Adds the command."""
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it."""
    try:
        igraph, drawsvg = libraries()
    except ImportError as error:
        write_error(str(error))
        return TROUBLE
    with opened(arguments.file) as file:
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
