"""Labels: what a transform does with each leaf of a tree, by way of each path to it; and one object under two labels.

Labels are given as a prefix tree (`in_axes`, `in_shardings`), or as one for each argument ("donated"). A label belongs
to an edge of the DAG and holds for what is below it, so one object may be reached under several.

What becomes of an object under a label is its *fate*: that of a traced leaf is what the label comes to for this leaf,
that of a node is the fates of its children, and what holds no traced leaf has none. Two ways into an object agree if
its fate is the same on both, however the prefix says so: `1` and `-1` can be one axis. Fates are numbered, for as
nested tuples they would be as large as the unfolded tree.

    Pair(w, [w])  under  Pair(0, 1)        w has the fates 0 and 1, the list (1,), the Pair (0, (1,))
"""

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._errors import SharingMismatchError
from ..core._node_types import node_type_of
from ..core._prefix_trees import Branch, labels, raise_unfit
from ..core._static_values import Static
from ..core._structure import LEAF
from ..core._trees_taken_apart import Walked

NO_FATE = 0
"""Of what holds no traced leaf."""

CUT, SAID, REFUSED = "cut", "cut and said", "refused"
"""What becomes of an array, or a container, that the edges of one module reach with two labels."""

DONATED, KEPT = "donated", "not donated"
"""The labels of what a transform takes the buffers of, and of what it does not."""


def is_donated(label: Sequence[Any]) -> bool:
    """Whether a hand with these labels is."""
    return any(each is DONATED for each in label)


Way = tuple[int, int]
"""A record, and the part of a prefix under which it is reached, by its number."""


def _as_it_is(label: Any, leaf: Any, number: int) -> Any:
    return label


def _no_advice(leaves: Sequence[Any]) -> str:
    return ""


def _nothing(fates: "Fates") -> Collection[int]:
    return ()


class Treatment(NamedTuple):
    """What a transform does with a tree.

    Attributes:
        name: what the prefix is called: the option.
        prefix: a label, or a prefix tree of labels.
        is_label: whether an object in the prefix is a label.
        resolve: (label, leaf, its number) → what the label comes to for that leaf; compared by type and value.
        describe: what a label comes to → words.
        deals_resolved: whether leaves are dealt by what their labels come to, and not by the labels as written.
        is_known: False if a label only says that nothing is known, and so is no use to `explain`.
        advice: the leaves of what is treated in several ways → what an error says before its fix.
        partible: which modules that are treated in several ways become several, as arrays do.
        within_module: what becomes of an array that edges of one module reach with two labels: `CUT`, `SAID` or
            `REFUSED`.
        has_containers: whether mutable containers outside modules are objects, and so count as modules do.
    """

    name: str
    prefix: Any
    is_label: Callable[[Any], bool] = lambda _: True
    resolve: Callable[[Any, Any, int], Any] = _as_it_is
    describe: Callable[[Any], str] = str
    deals_resolved: bool = False
    is_known: bool = True
    advice: Callable[[Sequence[Any]], str] = _no_advice
    partible: Callable[["Fates"], Collection[int]] = _nothing
    within_module: str = CUT
    has_containers: bool = False


class Fates:
    """The fates of everything in a tree. Cost: one visit for each way into a record.

    Args:
        tree: with its objects.
        treatment: what is done to it.

    Attributes:
        of_leaves: fate of a leaf → what its label came to.

    Raises:
        PrefixError: where the prefix has a node of another class than the tree.
    """

    def __init__(self, tree: Walked, treatment: Treatment) -> None:
        self.tree = tree
        self.treatment = treatment
        self._parts: list[Any] = []
        self._labels: list[int] = []  # the parts that are labels; equal ones are one
        self._part_numbers: IdentityDict[int] = IdentityDict()
        self._below: dict[Way, list[Way]] = {}
        self._fates: dict[Way, int] = {}
        self._of_nodes: dict[tuple[int, ...], int] = {}
        self._num_fates = 1
        self.of_leaves: dict[int, Any] = {}
        self.root: Way = (tree.root, self._part_number(treatment.prefix))
        self._visit(self.root)

    def with_objects(self, objects: Sequence[Any]) -> "Fates":
        """The same of a tree with these objects; without any, of what can be kept: it keeps nothing of a call alive."""
        other = copy.copy(self)
        other.tree = Walked(self.tree.records, self.tree.root, objects)
        other.treatment = self.treatment._replace(resolve=_as_it_is, advice=_no_advice, partible=_nothing)
        return other

    def __getitem__(self, way: Way) -> int:
        return self._fates[way]

    def ways(self) -> Iterable[Way]:
        """Every way into a record, what is below before what is above."""
        return self._fates

    def several(self) -> dict[int, list[Way]]:
        """The records with more than one fate: a way for each of these."""
        found: dict[int, dict[int, Way]] = {}
        for way, fate in self._fates.items():
            found.setdefault(way[0], {}).setdefault(fate, way)
        return {number: list(ways.values()) for number, ways in found.items() if len(ways) > 1}

    def ways_from(self, root: Way) -> set[Way]:
        """All ways that lead on from one."""
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

    def label_at(self, way: Way) -> Any:
        """The label of a leaf, by which it is dealt."""
        return self.of_leaves[self._fates[way]] if self.treatment.deals_resolved else self._parts[way[1]]

    def part_at(self, way: Way) -> Any:
        """The part of the prefix under which a record is reached."""
        return self._parts[way[1]]

    def described(self, way: Way) -> str:
        """What becomes of a leaf, in words."""
        return self.treatment.describe(self.of_leaves[self._fates[way]])

    def all_described(self, way: Way) -> set[str]:
        """What becomes of the leaves to which a way leads, in words."""
        return {self.described(each) for each in self.ways_from(way) if self.tree.records[each[0]][0] is LEAF}

    def way_of_each(self) -> dict[tuple[int, int], Way]:
        """For each record and fate, the first way."""
        found: dict[tuple[int, int], Way] = {}
        for way, fate in self._fates.items():
            found.setdefault((way[0], fate), way)
        return found

    def _part_number(self, part: Any) -> int:
        number = self._part_numbers.get(part)
        if number is None:
            number = len(self._parts)
            if self.treatment.is_label(part):
                number = next((i for i in self._labels if are_one(self._parts[i], part)), number)
            if number == len(self._parts):
                self._parts.append(part)
                if self.treatment.is_label(part):
                    self._labels.append(number)
            self._part_numbers[part] = number
        return number

    def _find_below(self, way: Way) -> list[Way]:
        number, which = way
        children = self.tree.records[number][1]
        node = self.tree.node(number)
        if node is None:
            return []
        part = self._parts[which]
        if type(part) is Branch:
            return [(child, self._part_number(below)) for child, below in zip(children, part.parts, strict=True)]
        if self.treatment.is_label(part):
            return [(child, which) for child in children]
        node_type = node_type_of(part)
        parts, aux = ((), None) if node_type is None else node_type.take_apart(part)
        fits = node_type is not None and node_type.cls is node.type.cls and len(parts) == len(children)
        if not fits or (node.type.is_plain and node.aux != Static(aux)):
            self._raise_unfit()
        return [(child, self._part_number(below)) for child, below in zip(children, parts, strict=True)]

    def _raise_unfit(self) -> None:
        treatment, tree = self.treatment, self.tree
        try:  # this says where
            for each in labels(treatment.prefix, tree, treatment.is_label, treatment.name):
                if tree.records[each.record][0] is LEAF and not treatment.is_label(each.label):
                    raise_unfit(treatment.name, each.label, "a leaf", each.path)
        except SharingMismatchError as error:
            nodes = [tree.node(each) for each in range(len(tree.records))]
            error.concerns_modules = any(node is not None and not node.type.is_plain for node in nodes)
            raise
        raise AssertionError("one of the two readings of a prefix is wrong")

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
        if self.tree.records[number][0] is LEAF:
            if not self.treatment.is_label(self._parts[which]):
                self._raise_unfit()
            resolved = self.treatment.resolve(self._parts[which], self.tree.objects[number], number)
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


def are_one(a: Any, b: Any) -> bool:
    """Whether two labels are one."""
    return a is b or (type(a) is type(b) and bool(a == b))


def distinct_labels(found: Iterable[Any]) -> list[Any]:
    """Labels, each once, in the order in which they come."""
    distinct: list[Any] = []
    for label in found:
        if not any(are_one(label, other) for other in distinct):
            distinct.append(label)
    return distinct


def labels_in(prefix: Any, is_label: Callable[[Any], bool]) -> list[Any]:
    """Returns the labels of a prefix, in the order in which they are met, each once."""
    found: list[Any] = []
    # A part of the prefix may be shared, with exponentially many paths to it.
    met = IdentitySet()
    stack = [prefix]
    while stack:
        part = stack.pop()
        node_type = None if type(part) is Branch or is_label(part) else node_type_of(part)
        if type(part) is Branch or node_type is not None:
            if met.add(part):
                parts = part.parts if node_type is None else node_type.take_apart(part)[0]
                stack.extend(reversed(parts))
        else:
            found.append(part)
    return distinct_labels(found)
