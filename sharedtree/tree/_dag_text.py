"""A DAG as text, in which what is tied stands once, with a number, and the number wherever it comes again.

    Dag({'embed': #1 float32[4,3], 'head': #1})

Arrays are their dtypes and shapes. Nothing of the model is asked for a text of its own but values that are static.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jax import tree_util as jtu

from ..core._comparison import described
from ..core._node_types import carries_identity
from ..core._printing import printable, shown
from ..core._static_values import Static
from ..core._structure import LEAF, FlatDag, Node, Structure, with_several_edges

_WIDTH, _MOST_LINES, _MOST_INDENT = 100, 200, 40

_ADDRESS = re.compile(" at 0x[0-9a-f]+")

_BRACKETS = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}


def dag_text(structure: Structure, leaves: Sequence[Any]) -> str:
    """The text of what a structure and its leaves stand for: on one line, or on 200 at most.

    Cost: one walk over the nodes, however many paths there are.
    """
    text = _Text(structure, leaves)
    lines: list[str] = []
    for line in text.lines():
        if len(lines) == _MOST_LINES:
            lines.append("  ... and more: sharedtree.summary(dag)")
            break
        lines.append(line)
    return f"Dag({lines[0]})" if len(lines) == 1 else "\n".join(["Dag(", *lines, ")"])


class _Text:
    def __init__(self, structure: Structure, leaves: Sequence[Any]) -> None:
        tree = FlatDag.of_leaves(structure, leaves)
        self._records, self._root, self._leaf_of = tree.records, tree.root, tree.leaves
        several = with_several_edges(tree.records, tree.root)
        tied = [number for number in tree.first_paths if number in several]
        self._marks = {number: f"#{mark}" for mark, number in enumerate(tied, 1)}
        # Of a tied node the first place shows what is in it, and that is the first in the order of the walk.
        self._shown_in = self._first_places()
        self._flat: list[str | None] = []
        for number in range(len(self._records)):
            self._flat.append(self._on_one_line(number))

    def _first_places(self) -> dict[int, tuple[int, int]]:
        first: dict[int, tuple[int, int]] = {}
        stack = [(self._root, (-1, -1))]
        while stack:
            number, place = stack.pop()
            if number not in first:
                first[number] = place
                children = self._records[number][1]
                stack.extend([(children[i], (number, i)) for i in range(len(children) - 1, -1, -1)])
        return first

    def lines(self) -> Iterator[str]:
        """The text on lines, or one line if it fits."""
        flat = self._marked(self._root, self._flat[self._root])
        if flat is not None and len(flat) <= _WIDTH - len("Dag()"):
            yield flat
            return
        stack: list[tuple[str, int, int, str]] = [
            ("", self._root, 1, "")
        ]  # what is before, number, depth, what is after
        while stack:
            before, number, depth, after = stack.pop()
            indent = "  " * min(depth, _MOST_INDENT)
            flat = before if number < 0 else None
            if number >= 0:
                fits = self._flat[number]
                flat = None if fits is None else before + (self._marked(number, fits) or "")
            if flat is not None and (number < 0 or len(indent) + len(flat) <= _WIDTH or not self._records[number][1]):
                yield indent + flat + after
                continue
            opening, closing = self._brackets(number)
            yield indent + before + (self._marked(number, opening) or "")
            children = self._records[number][1]
            stack.append((closing, -1, depth, after))
            for i in range(len(children) - 1, -1, -1):
                name = self._name(number, i)
                if self._is_again(number, i):
                    stack.append((name + self._marks[children[i]], -1, depth + 1, ","))
                else:
                    stack.append((name, children[i], depth + 1, ","))

    def _is_again(self, number: int, i: int) -> bool:
        child = self._records[number][1][i]
        return child in self._marks and self._shown_in.get(child) != (number, i)

    def _marked(self, number: int, text: str | None) -> str | None:
        mark = self._marks.get(number)
        return text if mark is None or text is None else f"{mark} {text}"

    def _on_one_line(self, number: int) -> str | None:
        """The text of a record, if it is short, without its own mark."""
        op, children = self._records[number]
        if op is LEAF:
            return _leaf_text(self._leaf_of[number])
        if type(op) is Static:
            return printable(_ADDRESS.sub("", shown(op.peek())))
        if type(op) is not Node or op.type.cls is type(None):
            return "None"
        if len(children) > _WIDTH:
            return None
        parts: list[str] = []
        for i, child in enumerate(children):
            text = self._marks[child] if self._is_again(number, i) else self._marked(child, self._flat[child])
            if text is None:
                return None
            parts.append(self._name(number, i) + text)
        opening, closing = self._brackets(number)
        comma = "," if op.type.cls is tuple and len(parts) == 1 else ""
        text = opening + ", ".join(parts) + comma + closing
        return text if len(text) <= _WIDTH else None

    def _brackets(self, number: int) -> tuple[str, str]:
        op = self._records[number][0]
        cls = op.type.cls if type(op) is Node else object
        return _BRACKETS.get(cls, (f"{printable(cls.__name__)}(", ")"))

    def _name(self, number: int, i: int) -> str:
        """What is before a child: `weight=`, `'embed': `."""
        op = self._records[number][0]
        if type(op) is not Node or isinstance(op.keys[i], jtu.SequenceKey):
            return ""
        key = op.keys[i]
        if isinstance(key, jtu.GetAttrKey):
            return f"{printable(str(key.name))}="
        return f"{printable(shown(key.key))}: " if isinstance(key, jtu.DictKey) else f"{printable(str(key))}="


def _leaf_text(leaf: Any) -> str:
    text = described(leaf)
    return printable(text.replace(", ", ",") if carries_identity(leaf) else text)
