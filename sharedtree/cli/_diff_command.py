"""`diff A B`: what differs between two files, in structure, ties and values.

The exit status is 0 if nothing does, 1 if something does, and 2 on trouble, as of `diff`.

JSON: `a` and `b`, the files; `equal`; `differences`, each with `what` and `paths`, and where there is something to say
`old`, `new`, `differing`, `size` and `max_abs_difference`. `what` is one of

- `added`, `removed`: a part that only one file has, with what it is
- `changed`: a class, dtype, shape, static value, or the kind of an array (JAX's or NumPy's, weakly typed)
- `order`: of the keys of a dictionary
- `values`: elements of an array of the same shape; `differing` of `size` elements, by up to `max_abs_difference`, which
  is a number or one of the texts "inf" and "nan", and missing where the difference has no size
- `tied`, `untied`: paths that lead to one object in B only, in A only
- `metadata`: a text that was saved beside the tree; the path is its key
"""

import argparse
import math
from typing import Any

from ..serialise.load import opened
from ._diff import Difference, compare
from ._terminal_output import FOUND, OK, Style, counted, line_writer, write_json


def add_to(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "diff",
        help="compare two files",
        description="Compares two files: structure, ties, values. Arrays are read a piece at a time. "
        "Exit status: 0 if they hold the same, 1 if not, 2 on trouble.",
    )
    parser.add_argument("a", metavar="A", help="the old file")
    parser.add_argument("b", metavar="B", help="the new file")
    parser.add_argument("--structure", action="store_true", help="compare all but the values of arrays; reads no array")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it."""
    with opened(arguments.a) as a, opened(arguments.b) as b:
        differences = compare(a, b, values=not arguments.structure)
        if arguments.json:
            found = [_as_json(each) for each in differences]
            write_json({"a": arguments.a, "b": arguments.b, "equal": not found, "differences": found})
            return FOUND if found else OK
        write = line_writer()
        number = 0
        for difference in differences:
            number += 1
            mark, style = _MARKS[difference.what]
            write((f"{mark} ", style), (_where(difference), "path"), (_told(difference), ""))
        write((counted(number, "difference") if number else "no differences", "bad" if number else "good"))
    return FOUND if number else OK


_MARKS: dict[str, tuple[str, Style]] = {
    "added": ("+", "good"),
    "removed": ("-", "bad"),
    "tied": ("+", "good"),
    "untied": ("-", "bad"),
}
_MARKS |= dict.fromkeys(("changed", "order", "values", "metadata"), ("~", "tie"))


def _where(difference: Difference) -> str:
    if difference.what == "metadata":
        return f"metadata {difference.paths[0]}"
    return f"{'tie  ' if len(difference.paths) > 1 else ''}" + " is ".join(map(_or_root, difference.paths))


def _or_root(path: str) -> str:
    return path or "(the tree itself)"


def _told(difference: Difference) -> str:
    what, old, new = difference.what, difference.old, difference.new
    if what in ("tied", "untied"):
        return ""
    if what == "values":
        by = "" if difference.max_abs is None else f", by up to {_number(difference.max_abs)}"
        about = old if old == new else f"{old} -> {new}"
        return f"  {about}: {difference.differing:,} of {counted(difference.size or 0, 'element')} differ{by}"
    if what == "metadata":
        return f"  {'none' if old is None else repr(old)} -> {'none' if new is None else repr(new)}"
    if what == "order":
        return f"  order of keys: {old} -> {new}"
    if old is None or new is None:
        return f"  {old or new or ''}"
    return f"  {old} -> {new}"


def _number(number: float | int) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.6g}"


def _as_json(difference: Difference) -> dict[str, Any]:
    found = {key: value for key, value in difference._asdict().items() if value is not None}
    size = found.pop("max_abs", None)
    if size is not None:
        found["max_abs_difference"] = size if math.isfinite(size) else str(size)
    return {**found, "paths": list(difference.paths)}
