"""Generated readers: they check that a tree still has its structure while they read its leaves and nodes."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._equinox_internals import is_any_set
from .._node_types import dict_descriptor, is_namedtuple
from .._static_keys import BY_VALUE
from .._statics import Static
from .._structure import LEAF, Node, Record
from ._parts import deserves_a_function, parts_of, runs
from ._source import MAX_LOOPS, Source, indented

_LEAVES, _ALIKE = "leaves", "alike"


class _Part(NamedTuple):
    """A generated function for a closed part; the records are relative to the one at its top."""

    name: str
    leaves: list[int]
    alike: list[int]


class Readers:
    """Generates code that reads the trees of one crossing.

    Each tree's leaves go into a list, in the order of its structure, and the nodes that must be compared into another:
    see `_alike`.

    Args:
        source: where the functions go.
        records: of all trees.
        roots: of the trees.
    """

    def __init__(self, source: Source, records: Sequence[Record], roots: Sequence[int]) -> None:
        self.source = source
        self.records = records
        self.parts = parts_of(records, roots)
        self.alike = _alike(records)
        self.variable_of: dict[int, str] = {}  # the records that the function being written has read so far
        self._functions: dict[int, _Part] = {}
        source.names |= {"Static": Static, "countOf": operator.countOf, "is_any_set": is_any_set}

    def read(self, root: int, variable: str, give_up: str = "return None") -> "Reading":
        """Lines that read one tree, calling `leaves` and `alike` with what they find."""
        reading = Reading(self, give_up)
        if root in self.variable_of:
            reading.give_up_if(f"{variable} is not {self.variable_of[root]}")
        else:
            reading.visit(root, variable, inline=True)
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
            self.source.function(name, "o, leaves, alike", [*reading.lines, "return True"])
            known = self._functions[code] = reading.relative_to(number, name)
        return known


def _alike(records: Sequence[Record]) -> set[int]:
    """The nodes that could have become one object without a leaf, or another of these, being read twice.

    Say that two nodes that hold their children have become one. Then so have their children, one by one. If those of
    some pair are two records, that pair is what is to be found: two leaves, which are compared, or again two nodes. If
    all are the same records, nothing but the nodes themselves tells: two lists of the same weight, two modules without
    weights. A node that makes its children when it comes apart makes others each time, so those tell nothing.
    """
    groups: dict[Any, list[int]] = {}
    carry = [op is LEAF or (type(op) is Node and op.type.carries_identity) for op, _ in records]
    for number, (op, children) in enumerate(records):
        if type(op) is Node and op.type.carries_identity:
            holds = op.type.is_plain or op.type.fields
            key = op.type.cls, tuple(child if holds and carry[child] else None for child in children)
            groups.setdefault(key, []).append(number)
    return {number for group in groups.values() if len(group) > 1 for number in group}


class Reading:
    """The body of one function, or of one loop, that reads.

    Attributes:
        lines: its code.
        leaves: the records of the leaves, in the order in which they are read.
        alike: those of the nodes that must be compared.
        leaf_variables: which hold references to leaves.
    """

    def __init__(self, readers: Readers, give_up: str, loops: int = 0) -> None:
        self.readers = readers
        self.source = readers.source
        self.give_up = give_up
        self.lines: list[str] = []
        self.leaves: list[int] = []
        self.alike: list[int] = []
        self.leaf_variables: list[str] = []
        self._loops = loops
        self._pending: dict[str, list[str]] = {_LEAVES: [], _ALIKE: []}

    def give_up_if(self, condition: str) -> None:
        """Gives up if a condition holds."""
        self.lines.append(f"if {condition}: {self.give_up}")

    def flush(self, *names: str) -> None:
        """Hands over what was read since the last time."""
        for name in names or self._pending:
            pending = self._pending[name]
            if pending:
                self.lines.append(f"{name}(({', '.join(pending)},))")
                pending.clear()

    def relative_to(self, number: int, name: str) -> _Part:
        """What was read, as the function of a part."""
        return _Part(name, *([n - number for n in found] for found in (self.leaves, self.alike)))

    def visit(self, number: int, variable: str, *, inline: bool = False) -> None:
        """Reads a record, and what is first met below it.

        Args:
            number: of the record.
            variable: what holds it.
            inline: whether it is the top of the function being written.
        """
        op = self.readers.records[number][0]
        self.readers.variable_of[number] = variable
        if op is LEAF:
            self._pending[_LEAVES].append(variable)
            self.leaf_variables.append(variable)
            self.leaves.append(number)
        elif type(op) is Static:
            self.static(op, variable)
        elif not inline and deserves_a_function(self.readers.parts, number, op, in_loop=self._loops > 0):
            self._call_part(number, variable)
        else:
            assert type(op) is Node
            if not self._take_leaves(number, op, variable):
                self._visit_children(number, op, variable)
            if number in self.readers.alike:
                self._pending[_ALIKE].append(variable)
                self.alike.append(number)

    def _call_part(self, number: int, variable: str) -> None:
        self.flush()
        part = self.readers.part(number)
        self.give_up_if(f"not {part.name}({variable}, leaves, alike)")
        self._took(part, number)

    def _took(self, part: _Part, number: int) -> None:
        self.leaves += [number + n for n in part.leaves]
        self.alike += [number + n for n in part.alike]

    def _visit_children(self, number: int, op: Node, variable: str) -> None:
        children = self.readers.records[number][1]
        parts = self.readers.parts
        found = [(start, stop) for start, stop in runs(parts, self.readers.records, number) if stop - start > 1]
        if op.type.cls not in (list, tuple) or self._loops == MAX_LOOPS:
            found = []
        in_loops = {i for start, stop in found for i in range(start, stop)}
        variables = self.take_apart(op, children, variable, len(in_loops) < len(children))
        for i, (child, own) in enumerate(zip(children, variables, strict=True)):
            if i not in in_loops:
                if (number, i) in parts.is_first:
                    self.visit(child, own)
                else:
                    self.give_up_if(f"{own} is not {self.readers.variable_of[child]}")
            elif found and i == found[0][0]:
                start, stop = found.pop(0)
                some = "" if stop - start == len(children) else f"[{start}:{stop}]"
                self._loop(children[start:stop], variables[start:stop], variable + some)

    def _loop(self, children: Sequence[int], variables: Sequence[str], sequence: str) -> None:
        """Reads equal closed parts that lie side by side."""
        self.flush()
        outer, self.readers.variable_of = self.readers.variable_of, {}
        each = self.source.variable()
        body = Reading(self.readers, self.give_up, self._loops + 1)
        body.visit(children[0], each, inline=True)
        body.flush()
        self.leaf_variables += body.leaf_variables
        self.readers.variable_of = outer
        self.lines += [f"for {each} in {sequence}:", *indented(body.lines)]
        part = body.relative_to(children[0], "")
        for child, variable in zip(children, variables, strict=True):
            self.readers.variable_of[child] = variable
            self._took(part, child)

    def static(self, op: Static, variable: str) -> None:
        """Checks a static value; one that can be mutated by content, even if it is the same object."""
        value = op.peek()
        if type(value) in BY_VALUE:
            known = self.source.constant(value, "value")
            alike = f"(type({variable}) is not {self.source.constant(type(value), 'Class')} or {variable} != {known})"
            self.give_up_if(f"{variable} is not {known} and {alike}")
            return
        unequal = f"Static({variable}) != {self.source.constant(op, 'static')}"
        if op.is_settled:
            unequal = f"{variable} is not {self.source.constant(value, 'value')} and {unequal}"
        self.give_up_if(unequal)

    def take_apart(self, op: Node, children: Sequence[int], variable: str, is_read: bool = True) -> list[str]:
        """Checks a node and reads its children into variables. Without `is_read` only names them, for a loop."""
        cls: Any = op.type.cls
        if cls is type(None):
            self.give_up_if(f"{variable} is not None")
            return []
        self._check_type(op, variable)
        if op.type.fields:
            names, rest = op.aux.peek()
            variables = self._get_into([*names, *(name for name, _ in rest)], self._attributes(op, variable))
            self._check_statics(rest, variables[len(names) :])
            return variables[: len(names)]
        if _is_sequence(cls):
            self.give_up_if(f"len({variable}) != {len(children)}")
            return self._unpack(children, variable) if is_read else [f"{variable}[{i}]" for i in range(len(children))]
        if _has_text_keys(op):
            self._check_keys(op, variable)
            return self._get_into(op.aux.peek(), variable)
        parts, aux = self.source.variable(), self.source.variable()
        self.lines.append(f"{parts}, {aux} = {self.source.constant(op.type.take_apart, 'take')}({variable})")
        self.give_up_if(f"len({parts}) != {len(children)}")
        self.static(op.aux, aux)
        variables = self._unpack(children, parts)
        self.lines.append(f"{parts} = None")  # it holds the children, whose references are counted
        return variables

    def _take_leaves(self, number: int, op: Node, variable: str) -> bool:
        """Hands over all children at once, if they are leaves that nothing else refers to. Returns whether they are."""
        children = self.readers.records[number][1]
        parts = self.readers.parts
        simple = all(self.readers.records[child][0] is LEAF and not parts.is_shared[child] for child in children)
        if len(children) < 2 or not simple:  # the tuple of one costs as much as a variable
            return False
        if op.type.fields:
            self._check_type(op, variable)
            names, rest = op.aux.peek()
            attributes = self._attributes(op, variable)
            self._check_statics(rest, self._get_into([name for name, _ in rest], attributes))
            found = self._several(names, attributes)
        elif _is_sequence(op.type.cls) or _has_text_keys(op):
            self._check_type(op, variable)
            if _is_sequence(op.type.cls):
                self.give_up_if(f"len({variable}) != {len(children)}")
                found = variable
            else:
                self._check_keys(op, variable)
                found = self._several(op.aux.peek(), variable)
        else:
            return False
        self.flush(_LEAVES)
        self.lines.append(f"leaves({found})")
        self.leaves += children
        return True

    def _check_type(self, op: Node, variable: str) -> None:
        self.give_up_if(f"type({variable}) is not {self.source.constant(op.type.cls, 'Class')}")

    def _check_keys(self, op: Node, variable: str) -> None:
        """There are as many keys, all of them texts and of no subclass, which could be equal to a text."""
        count = len(op.aux.peek())
        self.give_up_if(f"len({variable}) != {count} or countOf(map(type, {variable}), str) != {count}")

    def _attributes(self, op: Node, variable: str) -> str:
        """A variable that holds the attributes of an object, checked to have no further fields."""
        names, rest = op.aux.peek()
        present = [*names, *(name for name, _ in rest)]
        absent = frozenset(op.type.fields) - frozenset(present)
        attributes = self.source.variable()
        read = self.source.constant(_reader(op.type.cls), "attributes")
        self.lines.append(f"{attributes} = {read}({variable})")
        self.give_up_if(f"type({attributes}) is not dict")  # a subclass may answer for what it does not have
        if absent:
            others = self.source.constant(absent, "absent")
            is_set = f"not {others}.isdisjoint({attributes}) and is_any_set({others}, {attributes})"
            self.give_up_if(f"len({attributes}) != {len(present)} and {is_set}")
        return attributes

    def _check_statics(self, rest: Sequence[tuple[str, Any]], variables: Sequence[str]) -> None:
        for own, (_, value) in zip(variables, rest, strict=True):
            self.static(Static(value), own)

    def _unpack(self, children: Sequence[int], sequence: str) -> list[str]:
        variables = [self.source.variable() for _ in children]
        if variables:
            self.lines.append(f"{', '.join(variables)}, = {sequence}")
        return variables

    def _get_into(self, names: Sequence[str], mapping: str) -> list[str]:
        variables = [self.source.variable() for _ in names]
        self.lines += [f"{own} = {mapping}[{name!r}]" for own, name in zip(variables, names, strict=True)]
        return variables

    def _several(self, names: Sequence[str], mapping: str) -> str:
        """An expression for a tuple of values: one call for many, and for few what the interpreter does fastest."""
        if len(names) > _FEW:
            return f"{self.source.constant(operator.itemgetter(*names), 'get')}({mapping})"
        return f"({', '.join(f'{mapping}[{name!r}]' for name in names)},)"


_FEW = 5  # up to here subscripts of a dictionary are faster than one call of an itemgetter


def _is_sequence(cls: type) -> bool:
    return cls in (tuple, list) or (
        is_namedtuple(cls) and cls.__iter__ is tuple.__iter__ and cls.__len__ is tuple.__len__
    )


def _has_text_keys(op: Node) -> bool:
    return op.type.cls is dict and all(type(name) is str for name in op.aux.peek())


_readers: dict[type, Any] = {}


def _reader(cls: type) -> Any:
    """One bound descriptor method for each class, so that equal code names equal constants."""
    return _readers.setdefault(cls, dict_descriptor(cls).__get__)
