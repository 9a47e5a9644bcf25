"""`repr` of a `Dag`: a tied object is printed once, with a mark, and as its mark alone at its other places.

    Dag({'embed': #1 float32[4,3], 'head': #1})

Arrays print as their dtypes and shapes. No `repr` of the model's classes is called, except those of static values.

A text is *flat* if it fits on one line. An object that has no flat text is printed on several lines, as its opening
bracket, one line or more for each child, and the closing bracket.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ..core._comparison import short_text
from ..core._node_types import carries_identity
from ..core._printing import printable, shown
from ..core._static_values import Static
from ..core._structure import LEAF, FlatDag, Node, Structure, records_with_several_edges

# The largest width in characters, number of lines, and depth of indentation in levels.
_WIDTH, _MOST_LINES, _MOST_INDENT = 100, 200, 40

# Addresses in the texts of functions differ from run to run, so they are left out.
_ADDRESS = re.compile(" at 0x[0-9a-f]+")

_BRACKETS = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}


def dag_text(structure: Structure, leaves: Sequence[Any]) -> str:
    """Prints a structure with its leaves, on one line or on at most 200.

    Cost: one walk over the nodes, however many paths lead to them.
    """
    text = _Text(structure, leaves)
    lines: list[str] = []
    for line in text.lines():
        if len(lines) == _MOST_LINES:
            lines.append("  ... and more: sharedtree.summary(dag)")
            break
        lines.append(line)
    return f"Dag({lines[0]})" if len(lines) == 1 else "\n".join(["Dag(", *lines, ")"])


class _Place(NamedTuple):
    """The place of a child in the tree: an edge from its parent.

    Attributes:
        parent: number of the record of the parent; -1 for the root, which has none.
        child_index: index of the child among the children.
    """

    parent: int
    child_index: int


class _TextLine(NamedTuple):
    """A record to print, or complete text.

    Attributes:
        prefix: text before the record, such as the name of the child. The whole line if there is no record.
        number: number of the record; None if the line has none.
        depth: levels of indentation.
        suffix: text after the record: a comma, or nothing.
    """

    prefix: str
    number: int | None
    depth: int
    suffix: str


class _Text:
    """The text of one DAG: marks of the tied records, their first places, and the flat text of each record."""

    def __init__(self, structure: Structure, leaves: Sequence[Any]) -> None:
        """Numbers the tied records, and makes the flat texts, children before parents."""
        tree = FlatDag.of_leaves(structure, leaves)
        self._records, self._root, self._leaf_of = tree.records, tree.root, tree.leaves
        # Marks: #1, #2 and so on, in flatten order.
        shared = records_with_several_edges(tree.records, tree.root)
        tied = [number for number in tree.first_paths if number in shared]
        self._marks = {number: f"#{mark}" for mark, number in enumerate(tied, 1)}
        self._first_place_of = self._find_first_places()
        # None for a record that does not fit on one line.
        self._flat_texts: list[str | None] = []
        for number in range(len(self._records)):
            self._flat_texts.append(self._flat_text(number))

    def _find_first_places(self) -> dict[int, _Place]:
        """Finds the first place of each record in flatten order. At all other places a tied record is only its mark."""
        first_places: dict[int, _Place] = {}
        stack = [(self._root, _Place(-1, -1))]
        while stack:
            number, place = stack.pop()
            if number not in first_places:
                first_places[number] = place
                # The last child goes on the stack first, so that the first one comes off first.
                children = self._records[number][1]
                stack.extend([(children[i], _Place(number, i)) for i in range(len(children) - 1, -1, -1)])
        return first_places

    def lines(self) -> Iterator[str]:
        """Yields the lines of the text: the flat text of the root if it fits between `Dag(` and `)`, else several."""
        root_text = self._flat_texts[self._root]
        if root_text is not None:
            root_text = self._with_mark(self._root, root_text)
            if len(root_text) <= _WIDTH - len("Dag()"):
                yield root_text
                return
        stack = [_TextLine("", self._root, 1, "")]
        while stack:
            prefix, number, depth, suffix = stack.pop()
            indent = "  " * min(depth, _MOST_INDENT)
            if number is None:
                yield indent + prefix + suffix
                continue
            children = self._records[number][1]
            flat_text = self._flat_texts[number]
            if flat_text is not None:
                line = indent + prefix + self._with_mark(number, flat_text)
                # A leaf cannot be split into lines, so it may be too long.
                if len(line) <= _WIDTH or not children:
                    yield line + suffix
                    continue
            opening, closing = self._brackets(number)
            yield indent + prefix + self._with_mark(number, opening)
            # The stack is last in, first out: the closing bracket goes in first, and the first child last.
            stack.append(_TextLine(closing, None, depth, suffix))
            for i in range(len(children) - 1, -1, -1):
                name = self._child_name(number, i)
                if self._is_repeated(number, i):
                    stack.append(_TextLine(name + self._marks[children[i]], None, depth + 1, ","))
                else:
                    stack.append(_TextLine(name, children[i], depth + 1, ","))

    def _is_repeated(self, number: int, i: int) -> bool:
        """Returns True if child `i` of a record is tied and printed at an earlier place. Here only its mark is."""
        child = self._records[number][1][i]
        return child in self._marks and self._first_place_of.get(child) != _Place(number, i)

    def _with_mark(self, number: int, text: str) -> str:
        """Puts the mark of a tied record before its text. Returns the text unchanged for other records."""
        mark = self._marks.get(number)
        return text if mark is None else f"{mark} {text}"

    def _flat_text(self, number: int) -> str | None:
        """Prints a record on one line, without its mark. Returns None if the text would be longer than a line."""
        op, children = self._records[number]
        if op is LEAF:
            return _leaf_text(self._leaf_of[number])
        if type(op) is Static:
            return printable(_ADDRESS.sub("", shown(op.peek())))
        if type(op) is not Node or op.type.cls is type(None):
            return "None"
        # Each child takes at least one character, so more of them cannot fit.
        if len(children) > _WIDTH:
            return None
        parts: list[str] = []
        for i, child in enumerate(children):
            name, text = self._child_name(number, i), self._flat_texts[child]
            if self._is_repeated(number, i):
                parts.append(name + self._marks[child])
            elif text is not None:
                parts.append(name + self._with_mark(child, text))
            else:
                return None
        opening, closing = self._brackets(number)
        comma = "," if op.type.cls is tuple and len(parts) == 1 else ""
        text = opening + ", ".join(parts) + comma + closing
        return text if len(text) <= _WIDTH else None

    def _brackets(self, number: int) -> tuple[str, str]:
        """Returns the opening and the closing bracket of a record: `[` and `]`, or `Linear(` and `)`."""
        op = self._records[number][0]
        cls = op.type.cls if type(op) is Node else object
        return _BRACKETS.get(cls, (f"{printable(cls.__name__)}(", ")"))

    def _child_name(self, number: int, i: int) -> str:
        """Prints the name of child `i` of a record: `weight=`, `'embed': `, or nothing in a sequence."""
        op = self._records[number][0]
        if type(op) is not Node or isinstance(op.keys[i], jtu.SequenceKey):
            return ""
        key = op.keys[i]
        if isinstance(key, jtu.GetAttrKey):
            return f"{printable(str(key.name))}="
        return f"{printable(shown(key.key))}: " if isinstance(key, jtu.DictKey) else f"{printable(str(key))}="


def _leaf_text(leaf: Any) -> str:
    """Prints dtype and shape of an array, or the value of another leaf."""
    text = short_text(leaf)
    return printable(text.replace(", ", ",") if carries_identity(leaf) else text)
