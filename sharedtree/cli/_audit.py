"""`audit FILE`: which classes and functions a file names, and which of them it would get.

Without `--trusted` nothing is imported but what sharedtree knows, and that only from where it is installed. The exit
status is 1 if something is refused, or would come from elsewhere.

JSON: `file`; `requests`, each with `name`, `kind` (`"class"`, `"function"` or `"method"`), `paths` (the first few
places), `allowed`, `found` and `why`, a text that is empty if all is well, and `elsewhere`, the place from which a
package would come that is not installed, or an empty text; `allow_list`, the names to trust if you trust what is
refused.
"""

import argparse
from typing import Any

from ..serialise import audit
from ._terminal_output import FOUND, OK, TROUBLE, line_writer, write_error, write_json


def add_to(commands: Any) -> None:
    """Adds the command."""
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it."""
    try:
        found = audit(arguments.file, trusted=arguments.trusted)
    except ValueError as error:
        write_error(str(error))  # a malformed name in `--trusted`, or a malformed file
        return TROUBLE
    if arguments.json:
        requests = [{**request._asdict(), "paths": list(request.paths)} for request in found.requests]
        write_json({"file": arguments.file, "requests": requests, "allow_list": list(found.allow_list)})
    else:
        write = line_writer()
        for line in str(found).split("\n"):
            write((line, "bad" if "  REFUSED: " in line or "  ELSEWHERE: " in line else ""))
    return FOUND if found.refused or found.elsewhere else OK
