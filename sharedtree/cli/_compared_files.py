"""One of two files that are compared: its nodes as labels and children that can be matched with those of the other.

What a node is, apart from its children, is its label. Each child has a key that is the same in both files: the name of
a field, an index, or a number for the key of a dictionary. Keys and members of sets are matched by what they are: equal
ones, of whichever file, have one number.
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from ..serialise.arrays._placing import ArrayEntry
from ..serialise.load import Opened
from ..serialise.values._atoms import atom_text, short
from ..serialise.values._kinds import TYPED, children_of, node_text, operands, steps
from ..serialise.values._nodes import Child
from ..serialise.values._paths import carries_identity

DICTIONARIES = frozenset({"dict", "OrderedDict", "defaultdict"})
SETS = frozenset({"set", "frozenset"})
SEQUENCES = frozenset({"list", "tuple", "deque"})
INSTANCES = frozenset({"object", "wrapper"})
MOST = 400
"""Characters of a text or a path that are shown."""

_WHOLE = frozenset({"enum", "path", "slice", "range"})  # a value, unless one of its children is a node
_FAMILIES = (DICTIONARIES, SETS, SEQUENCES, INSTANCES)

Numbers = dict[Hashable, int]
"""Numbers for values, the same for both files."""

Place = tuple[str, Child]
"""What leads to a child, and the child."""


class Side:
    """A file of two. `numbers` are shared by both.

    Attributes:
        container: the tensors.
        manifest: the tree.
        label: of a node, what it is, apart from its children. Of an array, only that it is one.
        places: of a node, the children by key, in order; of a dictionary, the values. Not to be changed.
    """

    def __init__(self, opened: Opened, numbers: Numbers) -> None:
        self.container, self.manifest = opened
        self.label: Callable[[int], tuple[Hashable, ...]] = functools.cache(self._label_of)
        self.places: Callable[[int], dict[Hashable, Place]] = functools.cache(self._places_of)
        self._label_text: Callable[[int], str] = functools.cache(self._label_text_of)
        self._of_value = numbers

    def node(self, number: int) -> list[Any]:
        """A node."""
        return self.manifest.nodes[number]

    def array(self, number: int) -> ArrayEntry:
        """The entry of an `array` node."""
        return self.manifest.arrays[self.node(number)[1]]

    def text(self, child: Child) -> str:
        """What a child is, in a few words."""
        return node_text(self.manifest, self.node(child)) if type(child) is int else atom_text(child)

    def long_text(self, child: Child) -> str:
        """What a child is, if another one has the same few words."""
        if type(child) is not int:
            texts = child if type(child) is list else [child]
            # Of a long text no more than the beginning is copied.
            return short(" ".join(text[: MOST + 1] if type(text) is str else repr(text) for text in texts), MOST)
        node = self.node(child)
        if node[0] not in TYPED:
            return self._label_text(child)
        entry = self.manifest.types[node[1]]
        version = f", version {entry.version}" if entry.version else ""
        return f"{entry.name}{version}, a {entry.kind if node[0] != 'wrapper' else 'wrapper of a function'}"

    def is_object(self, child: Child) -> bool:
        """Whether two occurrences of a child are a tie."""
        return type(child) is int and carries_identity(self.manifest, self.node(child))

    def _label_text_of(self, number: int) -> str:
        return short(" ".join(map(str, self.label(number))), MOST)

    def _label_of(self, number: int) -> tuple[Hashable, ...]:
        node = self.node(number)
        if node[0] == "array":
            return ("array",)
        parts: list[Hashable] = [node[0]]
        for operand, value in operands(node):
            if operand.type == "type":
                entry = self.manifest.types[value]
                parts += (entry.name, entry.kind, entry.version)
            elif operand.type not in ("child", "children"):
                parts.append(tuple(value) if isinstance(value, list) else value)
        if _is_whole(node):
            parts.append(repr(list(children_of(node))))
        return tuple(parts)

    def _places_of(self, number: int) -> dict[Hashable, Place]:
        node = self.node(number)
        kind = node[0]
        if _is_whole(node):
            return {}
        below = steps(self.manifest, node)
        if kind in SETS:
            items = [(self._number_of(child), f"{{{self.text(child)}}}", child) for child in node[1]]
        elif kind in DICTIONARIES:
            numbers = [("key", self._number_of(key)) for key in node[-2]]
            values = list(below)[len(numbers) :]  # and what a `defaultdict` has besides
            keys = [*numbers, *(step for _, step in values[len(numbers) :])]
            items = [(key, step, child) for key, (child, step) in zip(keys, values, strict=True)]
        else:
            items = [(step, step, child) for child, step in below]
        found: dict[Hashable, Place] = {}
        times: Counter[Hashable] = Counter()
        for key, step, child in items:  # each key with how many of those before it were the same
            found[key, times[key]] = (step, child)
            times[key] += 1
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
