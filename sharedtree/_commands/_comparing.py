"""How two files differ: in structure, in ties, in values.

Both trees are walked at once, from the roots down, along the paths that they have in common. Two nodes that were found
to stand at one path are taken for the same from then on (union-find), so each pair of the walk makes one class of nodes
out of two, and the walk is about as long as the files are, however much is shared: Hopcroft and Karp's test of whether
two automata are equal ("A linear algorithm for testing equivalence of finite automata", 1971). Unlike theirs it goes on
after a difference. What differs is reported once, at the first path that leads there. And unlike theirs, two nodes may
have different numbers of children: of a large one that was compared before and is compared with a small one now, only
the children that both have are looked at, or a large list that one file has many times would be gone through as often.

Ties are compared as partitions of the paths that both files have. Only maximal ones are told.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from ..serialise.load import Opened
from ..serialise.values._manifest import ArrayEntry, Child
from ..serialise.values._texts import array_text
from ._array_differences import difference
from ._sides import DICTIONARIES, INSTANCES, Numbers, Side, are_comparable

What = Literal["added", "removed", "renamed", "changed", "order", "values", "tied", "untied", "metadata"]

_MAX_PATH = 400


class Difference(NamedTuple):
    """One difference.

    Attributes:
        what: `added` and `removed` parts, `renamed` fields, `changed` classes, dtypes, shapes and static values,
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


class _Pair(NamedTuple):
    """Two children at one path; and whether what holds them was met before, by another path, in each file."""

    a: Child
    b: Child
    place: int
    again: tuple[bool, bool] = (False, False)


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
    yield from _metadata(a.container.metadata, b.container.metadata)
    yield from _Comparison(a, b, values).run()


class _Comparison:
    def __init__(self, a: Opened, b: Opened, values: bool) -> None:
        numbers: Numbers = {}
        self._sides = Side(a, numbers), Side(b, numbers)
        self._values = values
        self._classes = list(range(len(a.manifest.nodes) + len(b.manifest.nodes)))  # union-find; those of `b` last
        self._offset = len(a.manifest.nodes)
        self._parents: list[tuple[int, str]] = [(-1, "")]  # place → the place above it, and the step from there
        self._occurrences: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})  # node → places
        self._one_sided: set[int] = set()  # places
        self._met: tuple[set[int], set[int]] = (set(), set())  # nodes without identity in parts that one file has alone
        self._compared: tuple[set[int], set[int]] = (set(), set())  # nodes whose children were compared with others
        self._alone: list[tuple[int, Child, int]] = []  # side, child, place: what one file has alone
        self._stack = [_Pair(a.manifest.root, b.manifest.root, 0)]

    def run(self) -> Iterator[Difference]:
        while self._stack:
            yield from self._pair(self._stack.pop())
        for side, child, place in self._alone:
            self._walk_alone(side, child, place)
        yield from self._ties()

    # --- one pair --------------------------------------------------------------------------------------------------

    def _pair(self, pair: _Pair) -> Iterator[Difference]:
        a, b, place, _ = pair
        if type(a) is not int or type(b) is not int:
            if type(a) is int or type(b) is int or not _is_same_atom(a, b):
                yield self._changed(pair)
                self._leave_alone(pair)
            return
        again = self._occurs(0, a, place, pair.again[0]), self._occurs(1, b, place, pair.again[1])
        if not self._unite(a, self._offset + b):
            return
        sides = self._sides
        kinds = sides[0].node(a)[0], sides[1].node(b)[0]
        if not are_comparable(*kinds):
            yield self._changed(pair)
            self._leave_below(pair)
            return
        if kinds[0] == "array":
            yield from self._arrays(pair)
            return
        if sides[0].label(a) != sides[1].label(b):
            yield self._changed(pair)
        yield from self._children(pair._replace(again=again))

    def _children(self, pair: _Pair) -> Iterator[Difference]:
        assert type(pair.a) is int
        assert type(pair.b) is int
        old, new = (side.places(number) for side, number in zip(self._sides, (pair.a, pair.b), strict=True))
        is_known = [number in done for number, done in zip((pair.a, pair.b), self._compared, strict=True)]
        for number, done in zip((pair.a, pair.b), self._compared, strict=True):
            done.add(number)
        if (len(old) > len(new) and is_known[0]) or (len(new) > len(old) and is_known[1]):
            texts = [self._sides[0].text(pair.a), self._sides[1].text(pair.b)]
            yield Difference(
                "changed", (self._path(pair.place),), f"{texts[0]} of {len(old)}", f"{texts[1]} of {len(new)}"
            )
            common = [key for key in min(old, new, key=len) if key in old and key in new]
            self._stack.extend(
                _Pair(old[key][1], new[key][1], self._place(pair.place, new[key][0]), pair.again)
                for key in reversed(common)
            )
            return
        kind = self._sides[0].node(pair.a)[0]
        order = [[key for key in found if key in old and key in new] for found in (old, new)]
        if kind in DICTIONARIES and order[0] != order[1]:
            told = [", ".join(found[key][0] for key in keys) for found, keys in zip((old, new), order, strict=True)]
            yield Difference("order", (self._path(pair.place),), _short(told[0]), _short(told[1]))
        renamed: dict[object, object] = {}
        if kind in INSTANCES:
            renamed = self._renamed(list(old.items()), list(new.items()))
        pairs: list[_Pair] = []
        for key, (step, child) in old.items():
            if key not in new and key not in renamed:
                place = self._place(pair.place, step)
                yield Difference("removed", (self._path(place),), old=self._sides[0].text(child))
                self._alone.append((0, child, place))
        former = {new_key: old_key for old_key, new_key in renamed.items()}
        for key, (step, child) in new.items():
            place = self._place(pair.place, step)
            if key in old or key in former:
                was, counterpart = old[former.get(key, key)]
                if key in former:
                    yield Difference("renamed", (self._path(place),), was, step)
                pairs.append(_Pair(counterpart, child, place, pair.again))
            else:
                yield Difference("added", (self._path(place),), new=self._sides[1].text(child))
                self._alone.append((1, child, place))
        self._stack.extend(reversed(pairs))

    def _renamed(self, old: Sequence[tuple], new: Sequence[tuple]) -> dict[object, object]:
        """Fields that one class has and the other lacks, in one place of the list and with the same in them."""
        names_old, names_new = {key for key, _ in old}, {key for key, _ in new}
        found: dict[object, object] = {}
        for (old_key, (_, a)), (new_key, (_, b)) in zip(old, new, strict=False):
            is_other = old_key not in names_new and new_key not in names_old
            if is_other and self._sides[0].text(a) == self._sides[1].text(b):
                found[old_key] = new_key
        return found

    def _arrays(self, pair: _Pair) -> Iterator[Difference]:
        assert type(pair.a) is int
        assert type(pair.b) is int
        a, b = self._sides[0].array(pair.a), self._sides[1].array(pair.b)
        path = (self._path(pair.place),)
        if _about(a) != _about(b):
            yield Difference("changed", path, array_text(a), array_text(b))
        if a.shape != b.shape or not self._values:
            return
        found = difference(self._sides[0].container, a, self._sides[1].container, b)
        if found is not None and found.differing:
            text = array_text(a), array_text(b)
            yield Difference("values", path, *text, found.differing, found.size, found.max_abs)

    def _changed(self, pair: _Pair) -> Difference:
        a, b = (side.text(child) for side, child in zip(self._sides, pair[:2], strict=True))
        if a == b:
            a, b = self._long_text(0, pair.a), self._long_text(1, pair.b)
        return Difference("changed", (self._path(pair.place),), a, b)

    def _long_text(self, number: int, child: Child) -> str:
        """For two that have the same short text."""
        side = self._sides[number]
        if type(child) is not int:
            texts = child if type(child) is list else [child]
            return _short(" ".join(text[: _MAX_PATH + 1] if type(text) is str else repr(text) for text in texts))
        node = side.node(child)
        if node[0] in ("object", "wrapper", "registered", "enum"):
            entry = side.manifest.types[node[1]]
            version = f", version {entry.version}" if entry.version else ""
            return f"{entry.name}{version}, a {entry.kind if node[0] != 'wrapper' else 'wrapper of a function'}"
        return side.label_text(child)

    # --- paths, ties -----------------------------------------------------------------------------------------------

    def _place(self, above: int, step: str) -> int:
        self._parents.append((above, step))
        return len(self._parents) - 1

    def _path(self, place: int) -> str:
        steps: list[str] = []
        length = 0
        while place > 0 and length < _MAX_PATH:
            place, step = self._parents[place]
            steps.append(step)
            length += len(step)
        return ("..." if place > 0 else "") + "".join(reversed(steps))

    def _occurs(self, side: int, number: int, place: int, again: bool) -> bool:
        """Notes an occurrence; whether what is below was met by another path. Of what is, only the top is a tie."""
        if again:
            return True
        if not self._sides[side].is_object(number):
            return False
        places = self._occurrences[side].setdefault(number, [])
        places.append(place)
        return len(places) > 1

    def _unite(self, a: int, b: int) -> bool:
        """Makes one class of two; whether they were two."""
        classes = self._classes
        roots = []
        for each in (a, b):
            while classes[each] != each:
                classes[each] = classes[classes[each]]
                each = classes[each]
            roots.append(each)
        classes[roots[0]] = roots[1]
        return roots[0] != roots[1]

    def _leave_alone(self, pair: _Pair) -> None:
        for side, child, again in zip((0, 1), pair[:2], pair.again, strict=True):
            if not again:
                self._alone.append((side, child, pair.place))

    def _leave_below(self, pair: _Pair) -> None:
        """The same, for nodes whose own occurrence has been noted."""
        for side, number in zip((0, 1), pair[:2], strict=True):
            assert type(number) is int
            if number in self._met[side]:
                continue
            if not self._sides[side].is_object(number):
                self._met[side].add(number)
            if len(self._occurrences[side].get(number, ())) <= 1:
                self._alone += [
                    (side, child, self._place(pair.place, step))
                    for step, child in self._sides[side].places(number).values()
                ]

    def _walk_alone(self, side: int, child: Child, place: int) -> None:
        """Notes the occurrences in a part that the other file lacks. All common ones are noted by then."""
        met = self._met[side]
        stack = [(child, place)]
        while stack:
            child, place = stack.pop()
            if type(child) is not int or child in met:
                continue
            self._one_sided.add(place)
            if not self._sides[side].is_object(child):
                met.add(child)
            elif self._occurs(side, child, place, False):
                continue
            below = [(each, self._place(place, step)) for step, each in self._sides[side].places(child).values()]
            stack.extend(reversed(below))

    def _ties(self) -> Iterator[Difference]:
        whats: tuple[Literal["untied", "tied"], ...] = ("untied", "tied")
        groups = [[self._split(places) for places in found.values()] for found in self._occurrences]
        for side, what in enumerate(whats):
            others = {common for common, _ in groups[1 - side]}
            for common, rest in groups[side]:
                if len(common) > 1 and common not in others:
                    yield Difference(what, tuple(self._path(place) for place in common))
                if common and rest:
                    yield Difference(what, tuple(self._path(place) for place in (common[0], *rest)))

    def _split(self, places: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Places that both files have, and those that one has alone."""
        is_common = [place not in self._one_sided for place in places]
        common = tuple(place for place, yes in zip(places, is_common, strict=True) if yes)
        return common, tuple(place for place, yes in zip(places, is_common, strict=True) if not yes)


def _about(entry: ArrayEntry) -> tuple[object, ...]:
    return entry[1:]


def _is_same_atom(a: Child, b: Child) -> bool:
    if _is_nan(a) and _is_nan(b):
        return True
    return type(a) is type(b) and a == b


def _is_nan(atom: Child) -> bool:
    return type(atom) is list and atom[0] == "float" and atom[1].startswith("nan")


def _short(text: str) -> str:
    return text if len(text) <= _MAX_PATH else f"{text[: _MAX_PATH - 3]}..."


def _metadata(old: dict[str, str], new: dict[str, str]) -> Iterator[Difference]:
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            yield Difference("metadata", (key,), old.get(key), new.get(key))
