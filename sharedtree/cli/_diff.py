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

Both trees are walked at once, as `core/_comparison.py` says. Ties are compared as partitions of the paths that both
files have. Only maximal ones are told.
"""

import argparse
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from ..core._comparison import MISSING, MOST, Matching, Pair, Paths, differences_from, is_alone, matched
from ..serialise.load import Opened, opened
from ..serialise.values._atoms import short
from ..serialise.values._kinds_of_jax_values import entry_text
from ..serialise.values._nodes import Child
from ._compared_files import DICTIONARIES, Numbers, Side, are_comparable, array_difference
from ._terminal_output import FOUND, OK, Style, counted, line_writer, write_json

What = Literal["added", "removed", "changed", "order", "values", "tied", "untied", "metadata"]


class Difference(NamedTuple):
    """One difference.

    Attributes:
        what: `added` and `removed` parts, `changed` classes, dtypes, shapes and static values,
            another `order` of keys, `values` of arrays, paths that became one object (`tied`) or ceased to be one
            (`untied`), and `metadata`.
        paths: where; several for ties, for metadata the key.
        old: what was there, if it can be said.
        new: what is there now, likewise.
        differing: of `values`, how many elements differ.
        size: of `values`, how many there are.
        max_abs: of `values`, the largest absolute difference.
    """

    what: What
    paths: tuple[str, ...]
    old: str | None = None
    new: str | None = None
    differing: int | None = None
    size: int | None = None
    max_abs: float | int | None = None


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
    parser.set_defaults(run=diff)


def diff(arguments: argparse.Namespace) -> int:
    """Runs `diff`."""
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


def compare(a: Opened, b: Opened, *, values: bool = True) -> Iterator[Difference]:
    """The differences between two files, those of ties last.

    Args:
        a: the old one.
        b: the new one.
        values: whether to read the arrays.

    Raises:
        CorruptFileError: if an array that is read is damaged.

    Cost: a few look-ups a node, and one pass over the bytes of both, a piece at a time.
    """
    old, new = a.container.metadata, b.container.metadata
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            yield Difference("metadata", (key,), old.get(key), new.get(key))
    yield from _Comparison(a, b, values).run()


class _Comparison:
    def __init__(self, a: Opened, b: Opened, values: bool) -> None:
        numbers: Numbers = {}
        self._sides = Side(a, numbers), Side(b, numbers)
        self._values = values
        self._paths, self._matching = Paths(), Matching(len(a.manifest.nodes), len(b.manifest.nodes))
        self._occurrences: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})  # node → places
        self._nodes_at: dict[int, tuple[int, int]] = {}  # place that both files have → their nodes
        self._met: tuple[set[int], set[int]] = (set(), set())  # nodes without identity in parts that one file has alone
        self._alone: list[tuple[int, Child, int]] = []  # side, child, place: what one file has alone
        # Handed down is whether what holds a pair was met before, by another path, in each file.
        self._root = Pair(a.manifest.root, b.manifest.root, 0, (False, False))

    def run(self) -> Iterator[Difference]:
        yield from differences_from(self._root, self._meet)
        for side, child, at in self._alone:
            self._walk_alone(side, child, at)
        yield from self._ties()

    # --- one pair --------------------------------------------------------------------------------------------------

    def _meet(self, pair: Pair) -> Iterator[Difference | Pair]:
        a, b, at, again = pair
        if type(a) is not int or type(b) is not int:
            if type(a) is int or type(b) is int or not _is_same_atom(a, b):
                yield self._changed(pair)
                self._alone += [(side, child, at) for side, child in enumerate((a, b)) if not again[side]]
            return
        self._nodes_at[at] = a, b
        again = self._occurs(0, a, at, again[0]), self._occurs(1, b, at, again[1])
        if not self._matching.unite(a, b):
            return
        old, new = self._sides
        kind = old.node(a)[0]
        if not are_comparable(kind, new.node(b)[0]):
            yield self._changed(pair)
            self._leave_below(0, a, at)
            self._leave_below(1, b, at)
        elif kind == "array":
            yield from self._arrays(a, b, at)
        else:
            if old.label(a) != new.label(b):
                yield self._changed(pair)
            yield from self._children(a, b, at, again)

    def _children(self, a: int, b: int, at: int, again: tuple[bool, bool]) -> Iterator[Difference | Pair]:
        old, new = self._sides[0].places(a), self._sides[1].places(b)
        is_short = self._matching.is_short(a, b, len(old), len(new))
        if is_short:
            texts = self._sides[0].text(a), self._sides[1].text(b)
            yield self._differs("changed", at, f"{texts[0]} of {len(old)}", f"{texts[1]} of {len(new)}")
        elif self._sides[0].node(a)[0] in DICTIONARIES:
            before, now = ([found[key][0] for key in found if key in old and key in new] for found in (old, new))
            if before != now:
                yield self._differs("order", at, *(short(", ".join(steps), MOST) for steps in (before, now)))
        for _, *places in matched(old, new, is_short=is_short):
            below = self._paths.below(at, next(place[0] for place in reversed(places) if place is not MISSING))
            if not is_alone(*places):
                yield Pair(places[0][1], places[1][1], below, again)
                continue
            side = int(places[0] is MISSING)
            child = places[side][1]
            text = self._sides[side].text(child)
            yield self._differs("added", below, None, text) if side else self._differs("removed", below, text, None)
            self._alone.append((side, child, below))

    def _arrays(self, a: int, b: int, at: int) -> Iterator[Difference]:
        old, new = self._sides[0].array(a), self._sides[1].array(b)
        texts = entry_text(old), entry_text(new)
        if old[1:] != new[1:]:  # all but the name
            yield self._differs("changed", at, *texts)
        if old.shape == new.shape and self._values:
            found = array_difference(self._sides[0].container, old, self._sides[1].container, new)
            if found is not None and found.differing:
                yield Difference("values", (self._paths.text(at),), *texts, *found)

    def _changed(self, pair: Pair) -> Difference:
        old, new = self._sides
        texts = old.text(pair.left), new.text(pair.right)
        if texts[0] == texts[1]:
            texts = old.long_text(pair.left), new.long_text(pair.right)
        return self._differs("changed", pair.at, *texts)

    def _differs(self, what: What, at: int, old: str | None, new: str | None) -> Difference:
        return Difference(what, (self._paths.text(at),), old, new)

    # --- ties ------------------------------------------------------------------------------------------------------

    def _occurs(self, side: int, number: int, at: int, again: bool) -> bool:
        """Notes an occurrence; whether what is below was met by another path. Of what is, only the top is a tie."""
        if again or not self._sides[side].is_object(number):
            return again
        places = self._occurrences[side].setdefault(number, [])
        places.append(at)
        return len(places) > 1

    def _leave_below(self, side: int, number: int, at: int) -> None:
        """Leaves to one file what is below a node whose own occurrence has been noted."""
        if number in self._met[side]:
            return
        if not self._sides[side].is_object(number):
            self._met[side].add(number)
        if len(self._occurrences[side].get(number, ())) <= 1:
            places = self._sides[side].places(number).values()
            self._alone += [(side, child, self._paths.below(at, step)) for step, child in places]

    def _walk_alone(self, side: int, child: Child, at: int) -> None:
        """Notes the occurrences in a part that the other file lacks. All common ones are noted by then."""
        met = self._met[side]
        stack = [(child, at)]
        while stack:
            child, at = stack.pop()
            if type(child) is not int or child in met:
                continue
            if not self._sides[side].is_object(child):
                met.add(child)
            elif self._occurs(side, child, at, False):
                continue
            below = [(each, self._paths.below(at, step)) for step, each in self._sides[side].places(child).values()]
            stack.extend(reversed(below))

    def _ties(self) -> Iterator[Difference]:
        """What is one object in one file only, at places that both have; and with it, at places that it has alone."""
        whats: tuple[Literal["untied", "tied"], ...] = ("untied", "tied")
        tied = [{number: places for number, places in found.items() if len(places) > 1} for found in self._occurrences]
        common = [
            {number: [at for at in places if at in self._nodes_at] for number, places in each.items()} for each in tied
        ]
        noted: dict[int, set[int]] = {}  # of an object of the other file, where it was noted
        for side, what in enumerate(whats):
            noted.clear()
            for number, places in tied[side].items():
                both = common[side][number]
                others = {self._nodes_at[at][1 - side] for at in both}
                is_one = any(common[1 - side].get(other) == both for other in others)
                if not is_one and len(others) == 1 and self._sides[1 - side].is_object(*others):
                    # The part around it may be tied there by another path, below which nothing is noted.
                    (other,) = others
                    if other not in noted:
                        noted[other] = set(self._occurrences[1 - side].get(other, ()))
                    is_one = noted[other].isdisjoint(both)
                if len(both) > 1 and not is_one:
                    yield Difference(what, tuple(map(self._paths.text, both)))
                if both and len(both) < len(places):
                    rest = [at for at in places if at not in self._nodes_at]
                    yield Difference(what, tuple(map(self._paths.text, [both[0], *rest])))


def _is_same_atom(a: Child, b: Child) -> bool:
    is_nan = [type(atom) is list and atom[0] == "float" and atom[1].startswith("nan") for atom in (a, b)]
    return all(is_nan) or (type(a) is type(b) and a == b)
