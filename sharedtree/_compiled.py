"""Pack and unpack without walking: straight-line code, generated once for each structure.

The walk of `_graph` asks of each object what it is. For a structure that was seen before the answers are known, so they
only have to be checked: this is still a `Linear` with these fields, that list still has three entries, these two paths
still lead to one object, and no other two do. The generated *reader* checks exactly that while it reads every field,
and gives up if anything is different; then the walk decides. It never assumes that an object which it saw before is
unchanged. The generated *builder* makes the objects with `object.__new__` and one dictionary each.

Equal closed parts of a structure share one function (see `_parts`), so forty equal layers are read by one.

attrs, dataclasses and Equinox generate code for single classes in this way; here it is for a whole object graph.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from ._graph import LEAF, Given, Node, Record
from ._node_types import dict_descriptor
from ._parts import Parts, parts_of
from ._statics import Static

MAX_DEPTH = 150
"""Generated functions call one another, a level of nesting each, so deeper structures are left to the walk."""

_SMALL = 4  # records; reading a smaller part costs less than a call

class Source:
    """Lines of Python, and the objects that they name."""

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.names: dict[str, Any] = {}
        self._constants: dict[int, str] = {}
        self._variables = 0

    def variable(self) -> str:
        """A new local variable."""
        self._variables += 1
        return f"v{self._variables}"

    def constant(self, obj: Any, prefix: str) -> str:
        """A name for an object, which `names` keeps alive."""
        name = self._constants.get(id(obj))  # alive in `names`
        if name is None:
            name = f"{prefix}{len(self.names)}"
            self.names[name] = obj
            self._constants[id(obj)] = name  # as above
        return name

    def function(self, name: str, parameters: str, lines: Sequence[str]) -> None:
        """Adds a function."""
        self.functions.append(f"def {name}({parameters}):\n    " + "\n    ".join(lines or ["pass"]))

    def run(self) -> dict[str, Any]:
        """Compiles everything; returns the namespace with the functions."""
        exec(compile("\n".join(self.functions), "<sharedtree: generated>", "exec"), self.names)  # noqa: S102
        return self.names


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
        if op.is_mutable:
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
        if cls in (tuple, list) or hasattr(cls, "_fields"):
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


class Builders:
    """Generates code that builds the trees of one crossing.

    Args:
        source: where the functions go.
        records: of all trees.
        roots: of the trees.
    """

    def __init__(self, source: Source, records: Sequence[Record], roots: Sequence[int]) -> None:
        self.source = source
        self.records = records
        self.parts = parts_of(records, roots)
        self.variable_of: dict[int, str] = {}
        self._functions: dict[int, tuple[str, int]] = {}
        source.names["new"] = object.__new__

    def build(self, root: int, leaves: str, start: str = "") -> list[str]:
        """Lines that build one tree; `variable_of[root]` names it afterwards.

        Args:
            root: of the tree.
            leaves: the name of the list of its leaves.
            start: an expression for where in the list they begin, followed by ` + `; or nothing.
        """
        building = _Building(self, leaves, start)
        if root not in self.variable_of:
            building.visit(root, inline=True)
        return [*building.unpacking(), *building.lines]

    def part(self, number: int) -> tuple[str, int]:
        """The function that builds a closed part, and how many leaves it takes."""
        code = self.parts.code[number]
        known = self._functions.get(code)
        if known is None:
            outer, self.variable_of = self.variable_of, {}
            building = _Building(self, "leaves", "start + ")
            building.visit(number, inline=True)
            result = self.variable_of[number]
            self.variable_of = outer
            name = f"build{len(self._functions)}"
            lines = [*building.unpacking(), *building.lines, f"return {result}"]
            self.source.function(name, "leaves, start, given", lines)
            known = self._functions[code] = name, building.count
        return known


class _Building:
    """The body of one function that builds."""

    def __init__(self, builders: Builders, leaves: str, start: str) -> None:
        self.builders = builders
        self.source = builders.source
        self.leaves = leaves
        self.start = start
        self.lines: list[str] = []
        self.count = 0  # of leaves taken so far
        self._runs: list[tuple[int, list[str]]] = []  # leaves that lie side by side: where they begin, their variables

    def unpacking(self) -> list[str]:
        """Lines that take the leaves out of their list."""
        return [
            f"{', '.join(names)}, = {self.leaves}[{self.start}{first}:{self.start}{first + len(names)}]"
            for first, names in self._runs
        ]

    def visit(self, number: int, *, inline: bool = False) -> str:
        """Builds a record and what is first met below it; returns an expression for it."""
        op, children = self.builders.records[number]
        parts = self.builders.parts
        if op is LEAF:
            if not self._runs or self._runs[-1][0] + len(self._runs[-1][1]) != self.count:
                self._runs.append((self.count, []))
            self._runs[-1][1].append(f"x{number}")
            self.count += 1
            expression = f"x{number}"
        elif type(op) is Static:
            expression = static_expression(self.source, op)
        elif type(op) is Given:
            expression = f"given({op.number})"
        elif not inline and deserves_a_function(parts, number, op):
            name, taken = self.builders.part(number)
            self.lines.append(f"x{number} = {name}({self.leaves}, {self.start}{self.count}, given)")
            self.count += taken
            expression = f"x{number}"
        else:
            assert type(op) is Node
            below = [
                self.visit(child) if (number, i) in parts.is_first else self.builders.variable_of[child]
                for i, child in enumerate(children)
            ]
            expression = put_together(self.source, self.lines, op, below)
        self.builders.variable_of[number] = expression
        return expression


def static_expression(source: Source, op: Static) -> str:
    """An expression for a static value, or for a copy of it."""
    if op.is_mutable:
        return f"{source.constant(op, 'static')}.thaw()"
    return source.constant(op.peek(), "value")


def put_together(source: Source, lines: list[str], op: Node, below: Sequence[str]) -> str:
    """Lines that put a node together from expressions for its children; returns an expression for it."""
    cls: Any = op.type.cls
    if cls is type(None):
        return "None"
    made = source.variable()
    listed = "".join(f"{expression}, " for expression in below)
    if op.type.fields:
        names, rest = op.aux.peek()
        items = [f"{name!r}: {expression}" for name, expression in zip(names, below, strict=True)]
        items += [f"{name!r}: {static_expression(source, Static(value))}" for name, value in rest]
        lines.append(f"{made} = new({source.constant(cls, 'Class')})")
        lines.append(f"{source.constant(_setter(cls), 'write')}({made}, {{{', '.join(items)}}})")
        return made
    if cls is tuple:
        expression = f"({listed})"
    elif cls is list:
        expression = f"[{listed}]"
    elif hasattr(cls, "_fields"):
        expression = f"{source.constant(cls, 'Class')}({listed})"
    elif cls is dict and all(type(name) is str for name in op.aux.peek()):
        pairs = zip(op.aux.peek(), below, strict=True)
        expression = f"{{{', '.join(f'{name!r}: {value}' for name, value in pairs)}}}"
    else:
        put = source.constant(op.type.put_together, "put")
        expression = f"{put}({static_expression(source, op.aux)}, [{listed}])"
    lines.append(f"{made} = {expression}")
    return made


def deserves_a_function(parts: Parts, number: int, op: Any) -> bool:
    """Whether a record is the top of a closed part that is large enough to be a function of its own."""
    return parts.is_closed[number] and parts.size[number] >= _SMALL and not op.type.is_plain


_getters: dict[type, Any] = {}
_setters: dict[type, Any] = {}


def _getter(cls: type) -> Any:
    """One bound descriptor method for each class, so that equal code names equal constants."""
    return _getters.setdefault(cls, dict_descriptor(cls).__get__)


def _setter(cls: type) -> Any:
    return _setters.setdefault(cls, dict_descriptor(cls).__set__)
