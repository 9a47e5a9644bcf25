"""One object, two treatments: what a transform does to each object, by way of each path to it.

A *treatment* is given as a prefix tree of labels (`in_axes`, `in_shardings`), or as one label for each argument
("donated", "differentiated"). A label belongs to an edge of the DAG and holds for what is below it, so one object may
be reached under several.

What becomes of an object under a label is its *fate*: that of a traced leaf is what the label comes to for this leaf,
that of a node is the fates of its children, and what holds no traced leaf has none. Two ways into an object agree if
its fate is the same on both, however the prefix says so: `1` and `-1` can be one axis.

    Pair(w, [w])  under  Pair(0, 1)        w has the fates 0 and 1, the list (1,), the Pair (0, (1,))
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax

from .._errors import InconsistentSharingError
from .._node_types import node_type_of
from .._prefix import Branch, labels
from .._statics import Static
from .._structure import LEAF, Node, Op, Update
from ._crossed import Graph, Names, Position
from ._occurrences import Occurrences, Root, occurrences

NO_FATE = 0
"""Of what holds no traced leaf."""

Way = tuple[int, int]
"""A record, and the part of a prefix under which it is reached, by its number."""


class Treatment(NamedTuple):
    """What a transform does to its arguments, or will do to its results.

    Attributes:
        part_of: argument → its label, or a prefix tree of labels.
        is_label: whether an object in a prefix is a label.
        resolve: (label, leaf) → what the label comes to for that leaf; compared by type and value.
        describe: what a label comes to → words.
        name: what the prefix is called.
        is_known: False if a label only says that nothing is known, and so is no use to `explain`.
        advice: the leaves of what is treated in several ways → what an error says before its fix.
        partible: which modules that are treated in several ways become several, as arrays do.
    """

    part_of: Callable[[Position], Any]
    is_label: Callable[[Any], bool] = lambda _: True
    resolve: Callable[[Any, Any], Any] = lambda label, _: label
    describe: Callable[[Any], str] = str
    name: str = "prefix"
    is_known: bool = True
    advice: Callable[[Sequence[Any]], str] = lambda _: ""
    partible: Callable[["Fates"], Collection[int]] = lambda _: ()


class Fates:
    """The fates of everything in a graph. Cost: one visit for each way into a record.

    Args:
        graph: with its objects.
        prefixes: for each of its modules, the part of the prefix.
        treatment: what is done to them.
        names: for paths.

    Raises:
        SharingMismatchError: where a prefix has a node of another class than the module.
    """

    def __init__(self, graph: Graph, prefixes: Sequence[Any], treatment: Treatment, names: Names) -> None:
        self.graph = graph
        self.prefixes = prefixes
        self.treatment = treatment
        self.names = names
        self._parts: list[Any] = []
        self._labels: list[int] = []  # the parts that are labels; equal ones are one
        self._part_numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # whatever has its id in `_part_numbers`
        self._below: dict[Way, list[Way]] = {}
        self._fates: dict[Way, int] = {}
        self._of_nodes: dict[tuple[int, ...], int] = {}
        self._num_fates = 1
        self.of_leaves: dict[int, Any] = {}  # fate of a leaf → what its label came to
        self.ways = [(root, self._part_number(part)) for root, part in zip(graph.roots, prefixes, strict=True)]
        for way, module, part in zip(self.ways, graph.modules, prefixes, strict=True):
            try:
                self._visit(way)
            except _DoesNotFitError:  # this says where
                found = labels(part, graph.records, way[0], treatment.is_label, treatment.name, module.path)
                for _ in found:
                    pass
                raise

    def __getitem__(self, way: Way) -> int:
        return self._fates[way]

    def items(self) -> Iterable[tuple[Way, int]]:
        """Every way, with the fate to which it leads."""
        return self._fates.items()

    def several(self) -> dict[int, list[Way]]:
        """The records with more than one fate: a way for each of these."""
        found: dict[int, dict[int, Way]] = {}
        for way, fate in self._fates.items():
            found.setdefault(way[0], {}).setdefault(fate, way)
        return {number: list(ways.values()) for number, ways in found.items() if len(ways) > 1}

    def ways_from(self, root: Way) -> set[Way]:
        """All ways that lead on from a root."""
        found: set[Way] = set()
        stack = [root]
        while stack:
            way = stack.pop()
            if way not in found:
                found.add(way)
                stack.extend(self.below(way))
        return found

    def below(self, way: Way) -> list[Way]:
        """The ways into the children of a record."""
        known = self._below.get(way)
        if known is None:
            known = self._below[way] = self._find_below(way)
        return known

    def treatments_of(self, way: Way) -> list[Any]:
        """What becomes of the leaves to which a way leads."""
        found = {self._fates[each] for each in self.ways_from(way) if self.graph.records[each[0]][0] is LEAF}
        return [self.of_leaves[fate] for fate in sorted(found)]

    def part_of(self, number: int) -> Any:
        """The part of a prefix under which a record is reached, if on one way only or on any that is as good."""
        return next(self._parts[part] for record, part in self._fates if record == number)

    def path_to(self, way: Way) -> str:
        """A path that goes this way, in words."""
        stack = [(root, a.position, a.path) for root, a in zip(self.ways, self.graph.modules, strict=True)][::-1]
        seen: set[Way] = set()
        while stack:
            here, position, path = stack.pop()
            if here == way:
                return self.names.text(position, path)
            node = _node_of(self.graph.records[here[0]][0])
            if node is not None and here not in seen:
                seen.add(here)
                steps = list(zip(node.keys, self.below(here), strict=True))
                stack.extend([(below, position, (*path, key)) for key, below in reversed(steps)])
        raise KeyError(way)

    def occurrences(self, leaf: int) -> Occurrences:
        """Where a leaf is, and what becomes of it there."""

        def below(way: Way) -> list[tuple[object, Way]]:
            node = _node_of(self.graph.records[way[0]][0])
            return [] if node is None else list(zip(node.keys, self.below(way), strict=True))

        def treatment_at(_: Position, way: Way) -> str | None:
            return self.treatment.describe(self.of_leaves[self._fates[way]]) if way[0] == leaf else None

        roots = [Root(a.position, a.path, way) for way, a in zip(self.ways, self.graph.modules, strict=True)]
        return occurrences(roots, below, treatment_at, self.names.text)

    def raise_inconsistent(self, number: int, transform: str, why: str = "") -> NoReturn:
        """Raises the error for a record with several fates, which names every path of a leaf in it that has, too."""
        first, second, *_ = self.several()[number]
        below = dict.fromkeys(each[0] for each in sorted(self.ways_from(first)))
        leaves = [self.graph.objects[each] for each in below if self.graph.records[each][0] is LEAF]
        while self.graph.records[first[0]][0] is not LEAF:
            both = zip(self.below(first), self.below(second), strict=True)
            first, second = next((a, b) for a, b in both if self._fates[a] != self._fates[b])
        advice = (why or self._why(number)) + self.treatment.advice(leaves)
        raise_inconsistent(self.occurrences(first[0]), transform, advice, self.names)

    def _why(self, number: int) -> str:
        obj = self.graph.objects[number]
        if isinstance(obj, jax.Ref):
            return ""
        return f"Arrays that are treated differently become two, but not what a shared `{type(obj).__name__}` holds.\n"

    def _part_number(self, part: Any) -> int:
        number = self._part_numbers.get(id(part))  # in `_alive`
        if number is None:
            number = len(self._parts)
            if self.treatment.is_label(part):
                number = next((i for i in self._labels if are_one(self._parts[i], part)), number)
            if number == len(self._parts):
                self._parts.append(part)
                if self.treatment.is_label(part):
                    self._labels.append(number)
            self._alive.append(part)
            self._part_numbers[id(part)] = number  # in `_alive`
        return number

    def _find_below(self, way: Way) -> list[Way]:
        number, which = way
        op, children = self.graph.records[number]
        node = _node_of(op)
        if node is None:
            return []
        part = self._parts[which]
        if self.treatment.is_label(part):
            return [(child, which) for child in children]
        if type(part) is Branch:
            return [(child, self._part_number(below)) for child, below in zip(children, part.parts, strict=True)]
        node_type = node_type_of(part)
        parts, aux = ((), None) if node_type is None else node_type.take_apart(part)
        fits = node_type is not None and node_type.cls is node.type.cls and len(parts) == len(children)
        if not fits or (node.type.is_plain and node.aux != Static(aux)):
            raise _DoesNotFitError
        return [(child, self._part_number(below)) for child, below in zip(children, parts, strict=True)]

    def _visit(self, root: Way) -> None:
        stack = [root]
        while stack:
            way = stack[-1]
            missing = () if way in self._fates else [below for below in self.below(way) if below not in self._fates]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if way not in self._fates:
                self._fates[way] = self._fate(way)

    def _fate(self, way: Way) -> int:
        number, which = way
        op = self.graph.records[number][0]
        if op is LEAF:
            resolved = self.treatment.resolve(self._parts[which], self.graph.objects[number])
            known = next((fate for fate, other in self.of_leaves.items() if are_one(other, resolved)), None)
            if known is None:
                known = self._new_fate()
                self.of_leaves[known] = resolved
            return known
        fates = tuple([self._fates[below] for below in self.below(way)])
        if not any(fates):
            return NO_FATE
        known = self._of_nodes.get(fates)
        if known is None:
            known = self._of_nodes[fates] = self._new_fate()
        return known

    def _new_fate(self) -> int:
        self._num_fates += 1
        return self._num_fates - 1


class _DoesNotFitError(Exception):
    pass


def _node_of(op: Op) -> Node | None:
    node = op.node if type(op) is Update else op
    return node if type(node) is Node else None


def are_one(a: Any, b: Any) -> bool:
    """Whether two labels are one."""
    return a is b or (type(a) is type(b) and bool(a == b))


def has_one_treatment(graph: Graph, prefixes: Sequence[Any], treatment: Treatment) -> bool:
    """Whether a quick look says that no object can have two fates."""
    if not all(map(treatment.is_label, prefixes)):
        return False
    if all(are_one(part, prefixes[0]) for part in prefixes):
        return True
    # With one label for each module, only what is in two modules could.
    return not any(
        module.structure.root < module.structure.base
        or any(child < module.structure.base for _, children in module.structure.records for child in children)
        for module in graph.modules
    )


def raise_inconsistent(found: Occurrences, transform: str, advice: str, names: Names) -> NoReturn:
    """Raises the error for an object that a transform would treat in several ways."""
    raise InconsistentSharingError(
        "\n".join(
            [
                f"One object, but `{transform}` would treat its occurrences differently:",
                *found.lines,
                advice + part_them(found, names),
            ]
        ),
        found.paths,
        found.treatments,
    )


def part_them(found: Occurrences, names: Names) -> str:
    """The fix that always works: give the occurrences that are treated differently objects of their own."""
    groups = [[names.text(position) for position in positions] for positions in found.positions.values()]
    involved = list(dict.fromkeys(text for group in groups for text in group))
    together = ", ".join(involved)
    advice = "Treat them alike, or give each an object of its own before the call:\n"
    if sum(map(len, groups)) > len(involved):  # one argument holds both
        several = f"({together})" if len(involved) > 1 else together
        return f"{advice}    {together} = sharedtree.untie({several})"
    copied = [(", ".join(group), f"({', '.join(group)})" if len(group) > 1 else group[0]) for group in groups[1:]]
    lines = [f"    {names_of} = sharedtree.copy({several})" for names_of, several in copied]
    if len(involved) == 2:
        lines += ["or, with a copy of what they share only:"]
        lines += [f"    {together} = sharedtree.untie(({together}), lambda t: t[1:])"]
    return advice + "\n".join(lines)
