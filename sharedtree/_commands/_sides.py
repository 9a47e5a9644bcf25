"""One of two files that are compared: its nodes as labels and children that can be matched with those of the other.

What a node is, apart from its children, is its label. Each child has a key that is the same in both files: the name of
a field, an index, or a number for the key of a dictionary. Keys and members of sets are matched by what they are: equal
ones, of whichever file, have one number.
"""

import functools
from collections import Counter
from collections.abc import Hashable
from typing import Any

from ..serialise.load import Opened
from ..serialise.values._manifest import ArrayEntry, Child, TypeEntry, children_of, operands
from ..serialise.values._outline import carries_identity
from ..serialise.values._steps import steps
from ..serialise.values._texts import atom_text, node_text, short

DICTIONARIES = frozenset({"dict", "OrderedDict", "defaultdict"})
SETS = frozenset({"set", "frozenset"})
SEQUENCES = frozenset({"list", "tuple", "deque"})
INSTANCES = frozenset({"object", "wrapper"})
_WHOLE = frozenset({"enum", "path", "slice", "range"})  # a value, unless one of its children is a node
_MAX_LABEL = 400
_FAMILIES = (DICTIONARIES, SETS, SEQUENCES, INSTANCES)

Numbers = dict[Hashable, int]
"""Numbers for values, the same for both files."""

Place = tuple[str, Child]
"""What leads to a child, and the child."""


class Side:
    """A file of two.

    Args:
        opened: the file.
        numbers: shared by the two sides.
    """

    def __init__(self, opened: Opened, numbers: Numbers) -> None:
        self.container = opened.container
        self.manifest = opened.manifest
        self._of_value = numbers
        self._places: dict[int, dict[Hashable, Place]] = {}
        self._labels: dict[int, tuple[Hashable, ...]] = {}
        self._label_texts: dict[int, str] = {}

    def node(self, number: int) -> list[Any]:
        """A node."""
        return self.manifest.nodes[number]

    def array(self, number: int) -> ArrayEntry:
        """The entry of an `array` node."""
        return self.manifest.arrays[self.node(number)[1]]

    def text(self, child: Child) -> str:
        """What a child is, in a few words."""
        return node_text(self.manifest, self.node(child)) if type(child) is int else atom_text(child)

    def is_object(self, child: Child) -> bool:
        """Whether two occurrences of a child are a tie."""
        return type(child) is int and carries_identity(self.manifest, self.node(child))

    def label(self, number: int) -> tuple[Hashable, ...]:
        """What a node is, apart from its children. Of an array, only that it is one."""
        found = self._labels.get(number)
        if found is None:
            found = self._labels[number] = self._label_of(number)
        return found

    def label_text(self, number: int) -> str:
        """The beginning of a label as text."""
        found = self._label_texts.get(number)
        if found is None:
            found = self._label_texts[number] = short(" ".join(map(str, self.label(number))), _MAX_LABEL)
        return found

    def _label_of(self, number: int) -> tuple[Hashable, ...]:
        node = self.node(number)
        if node[0] == "array":
            return ("array",)
        parts: list[Hashable] = [node[0]]
        for operand, value in operands(node):
            if operand == "type":
                parts += _identity_of(self.manifest.types[value])
            elif operand not in ("child", "children"):
                parts.append(tuple(value) if isinstance(value, list) else value)
        if _is_whole(node):
            parts.append(repr(list(children_of(node))))
        return tuple(parts)

    def places(self, number: int) -> dict[Hashable, Place]:
        """The children of a node by key, in order; of dictionaries, the values. Not to be changed."""
        found = self._places.get(number)
        if found is None:
            found = self._places[number] = self._places_of(number)
        return found

    def _places_of(self, number: int) -> dict[Hashable, Place]:
        node = self.node(number)
        kind = node[0]
        found = _Places()
        if _is_whole(node):
            return found
        if kind in SETS:
            for member in node[1]:
                found.add(self._number_of(member), f"{{{self.text(member)}}}", member)
            return found
        if kind not in DICTIONARIES:
            for child, step in steps(self.manifest, node):
                found.add(step, step, child)
            return found
        keys, values = node[-2], node[-1]
        below = list(steps(self.manifest, node))[len(keys) :]
        for key, (value, step) in zip(keys, below[: len(values)], strict=True):
            found.add(("key", self._number_of(key)), step, value)
        for child, step in below[len(values) :]:
            found.add(step, step, child)
        return found

    def _number_of(self, child: Child) -> int:
        if type(child) is int:
            return self._numbers[child]
        return self._of_value.setdefault(("atom", repr(child)), len(self._of_value))

    @functools.cached_property
    def _numbers(self) -> list[int]:
        """A number for each node; equal ones have the same."""
        numbers: list[int] = []
        for i in range(len(self.manifest.nodes)):  # children stand before their parents
            node = self.node(i)
            below = [numbers[child] if type(child) is int else self._number_of(child) for child in children_of(node)]
            if node[0] in SETS:
                below.sort()
            about = self.text(i) if node[0] == "array" else self.label(i)
            numbers.append(self._of_value.setdefault((about, tuple(below)), len(self._of_value)))
        return numbers


def are_comparable(kind_a: str, kind_b: str) -> bool:
    """Whether nodes of two kinds have children that can be matched."""
    return kind_a == kind_b or any(kind_a in family and kind_b in family for family in _FAMILIES)


def _is_whole(node: list[Any]) -> bool:
    return node[0] in _WHOLE and not any(type(child) is int for child in children_of(node))


def _identity_of(entry: TypeEntry) -> tuple[Hashable, ...]:
    return (entry.name, entry.kind, entry.version)


class _Places(dict[Hashable, Place]):
    """Children under their keys, each with the number of those before it that had the same one."""

    def __init__(self) -> None:
        super().__init__()
        self._times: Counter[Hashable] = Counter()

    def add(self, key: Hashable, step: str, child: Child) -> None:
        """Adds a child."""
        self[key, self._times[key]] = (step, child)
        self._times[key] += 1
