"""Generated readers: they check that a tree still has its structure while they read its leaves and nodes."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._node_types import dict_descriptor, is_namedtuple
from .._statics import Static
from .._structure import LEAF, Node, Record
from ._parts import deserves_a_function, parts_of
from ._source import Source


class _Part(NamedTuple):
    """A generated function for a closed part; the records are relative to the one at its top."""

    name: str
    leaves: list[int]
    nodes: list[int]


class Readers:
    """Generates code that reads the trees of one crossing.

    Each tree's leaves go into a list, in the order of its structure, and its nodes that carry identity into another.

    Args:
        source: where the functions go.
        records: of all trees.
        roots: of the trees.
    """

    def __init__(self, source: Source, records: Sequence[Record], roots: Sequence[int]) -> None:
        self.source = source
        self.records = records
        self.parts = parts_of(records, roots)
        self.variable_of: dict[int, str] = {}  # the records that the function being written has read so far
        self._functions: dict[int, _Part] = {}
        source.names["Static"] = Static

    def read(self, root: int, variable: str, give_up: str = "return None") -> "Reading":
        """Lines that read one tree, calling `leaves` and `nodes` with what they find."""
        reading = Reading(self, give_up)
        if root in self.variable_of:
            reading.unless(f"{variable} is not {self.variable_of[root]}")
        else:
            reading.visit(root, variable)
        reading.flush()
        return reading

    def part(self, number: int) -> _Part:
        """The function that reads a closed part."""
        code = self.parts.code[number]
        known = self._functions.get(code)
        if known is None:
            outer, self.variable_of = self.variable_of, {}
            reading = Reading(self, "return False")
            reading.visit(number, "o", inline=True)
            reading.flush()
            self.variable_of = outer
            name = f"read{len(self._functions)}"
            self.source.function(name, "o, leaves, nodes", [*reading.lines, "return True"])
            known = _Part(name, [n - number for n in reading.leaves], [n - number for n in reading.nodes])
            self._functions[code] = known
        return known


class Reading:
    """The body of one function that reads."""

    def __init__(self, readers: Readers, give_up: str) -> None:
        self.readers = readers
        self.source = readers.source
        self.give_up = give_up
        self.lines: list[str] = []
        self.leaves: list[int] = []
        self.nodes: list[int] = []
        self._pending_leaves: list[str] = []
        self._pending_nodes: list[str] = []

    def unless(self, condition: str) -> None:
        """Gives up if a condition holds."""
        self.lines.append(f"if {condition}: {self.give_up}")

    def flush(self) -> None:
        """Hands over the leaves and nodes that were read since the last time."""
        for name, pending in (("leaves", self._pending_leaves), ("nodes", self._pending_nodes)):
            if pending:
                self.lines.append(f"{name}(({', '.join(pending)},))")
                pending.clear()

    def visit(self, number: int, variable: str, *, inline: bool = False) -> None:
        """Reads a record, and what is first met below it."""
        op, children = self.readers.records[number]
        parts = self.readers.parts
        self.readers.variable_of[number] = variable
        if op is LEAF:
            self._pending_leaves.append(variable)
            self.leaves.append(number)
        elif type(op) is Static:
            self.static(op, variable)
        elif not inline and deserves_a_function(parts, number, op):
            self.flush()
            part = self.readers.part(number)
            self.unless(f"not {part.name}({variable}, leaves, nodes)")
            self.leaves += [number + n for n in part.leaves]
            self.nodes += [number + n for n in part.nodes]
        else:
            assert type(op) is Node
            for i, (child, own) in enumerate(zip(children, self.take_apart(op, children, variable), strict=True)):
                if (number, i) in parts.is_first:
                    self.visit(child, own)
                else:
                    self.unless(f"{own} is not {self.readers.variable_of[child]}")
            if op.type.carries_identity:
                self._pending_nodes.append(variable)
                self.nodes.append(number)

    def static(self, op: Static, variable: str) -> None:
        """Checks a static value; one that can be mutated by content, even if it is the same object."""
        expected = self.source.constant(op, "static")
        unequal = f"Static({variable}) != {expected}"
        if not op.is_settled:
            self.unless(unequal)
        else:
            self.unless(f"{variable} is not {self.source.constant(op.peek(), 'value')} and {unequal}")

    def take_apart(self, op: Node, children: Sequence[int], variable: str) -> list[str]:
        """Checks a node and reads its children into variables."""
        cls: Any = op.type.cls
        if cls is type(None):
            self.unless(f"{variable} is not None")
            return []
        self.unless(f"type({variable}) is not {self.source.constant(cls, 'Class')}")
        if op.type.fields:
            return self._take_fields(op, variable)
        variables = [self.source.variable() for _ in children]
        if cls in (tuple, list) or is_namedtuple(cls):
            self.unless(f"len({variable}) != {len(children)}")
            self._unpack_into(variables, variable)
        elif cls is dict and all(type(name) is str for name in op.aux.peek()):
            self.unless(f"len({variable}) != {len(children)}")
            self._get_into(variables, op.aux.peek(), variable)
        else:
            parts, aux = self.source.variable(), self.source.variable()
            self.lines.append(f"{parts}, {aux} = {self.source.constant(op.type.take_apart, 'take')}({variable})")
            self.unless(f"len({parts}) != {len(children)}")
            self.static(op.aux, aux)
            self._unpack_into(variables, parts)
        return variables

    def _take_fields(self, op: Node, variable: str) -> list[str]:
        names, rest = op.aux.peek()
        present = [*names, *(name for name, _ in rest)]
        absent = frozenset(op.type.fields) - frozenset(present)
        attributes = self.source.variable()
        read = self.source.constant(_getter(op.type.cls), "attributes")
        self.lines.append(f"{attributes} = {read}({variable})")
        if absent:
            disjoint = f"{self.source.constant(absent, 'absent')}.isdisjoint({attributes})"
            self.unless(f"len({attributes}) != {len(present)} and not {disjoint}")
        variables = [self.source.variable() for _ in present]
        self._get_into(variables, present, attributes)
        for own, (_, value) in zip(variables[len(names) :], rest, strict=True):
            self.static(Static(value), own)
        return variables[: len(names)]

    def _unpack_into(self, variables: Sequence[str], sequence: str) -> None:
        if variables:
            self.lines.append(f"{', '.join(variables)}, = {sequence}")

    def _get_into(self, variables: Sequence[str], names: Sequence[str], mapping: str) -> None:
        if len(names) == 1:
            self.lines.append(f"{variables[0]} = {mapping}[{names[0]!r}]")
        elif names:
            getter = self.source.constant(operator.itemgetter(*names), "get")
            self.lines.append(f"{', '.join(variables)} = {getter}({mapping})")


_getters: dict[type, Any] = {}


def _getter(cls: type) -> Any:
    """One bound descriptor method for each class, so that equal code names equal constants."""
    return _getters.setdefault(cls, dict_descriptor(cls).__get__)
