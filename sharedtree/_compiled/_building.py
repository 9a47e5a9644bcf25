"""Generated builders: they put trees together with `object.__new__` and one dictionary for each object."""

from collections.abc import Sequence
from typing import Any

from .._node_types import dict_descriptor, is_namedtuple
from .._statics import Static
from .._structure import LEAF, Given, Node, Record
from ._parts import deserves_a_function, parts_of, runs
from ._source import MAX_LOOPS, Source, indented


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
    """The body of a function, which has its leaves in a list, or of a loop, which has them in variables."""

    def __init__(self, builders: Builders, leaves: str, start: str, loops: int = 0) -> None:
        self.builders = builders
        self.source = builders.source
        self.leaves = leaves
        self.start = start
        self.lines: list[str] = []
        self.count = 0  # of leaves taken so far
        self.has_calls = False  # of generated functions, which need the list
        self._loops = loops
        self._taken: list[tuple[int, list[str]]] = []  # leaves side by side: where they begin, their variables

    def unpacking(self) -> list[str]:
        """Lines that take the leaves out of their list."""
        return [f"{', '.join(names)}, = {self._some(first, len(names))}" for first, names in self._taken]

    @property
    def variables(self) -> list[str]:
        """Those that hold leaves, in order."""
        return [name for _, names in self._taken for name in names]

    def _some(self, first: int, count: int) -> str:
        """An expression for leaves that lie side by side."""
        return f"{self.leaves}[{self.start}{first}:{self.start}{first + count}]"

    def _take(self, count: int) -> str:
        """Takes the next leaves; returns an expression for them."""
        first, self.count = self.count, self.count + count
        if not self._loops:
            return self._some(first, count)
        names = [f"y{self._loops}_{first + i}" for i in range(count)]
        self._taken.append((first, names))
        return f"({''.join(f'{name}, ' for name in names)})"

    def visit(self, number: int, *, inline: bool = False) -> str:
        """Builds a record and what is first met below it; returns an expression for it."""
        op, children = self.builders.records[number]
        parts = self.builders.parts
        if op is LEAF:
            if self._loops or not self._taken or self._taken[-1][0] + len(self._taken[-1][1]) != self.count:
                self._taken.append((self.count, []))
            self._taken[-1][1].append(f"x{number}")
            self.count += 1
            expression = f"x{number}"
        elif type(op) is Static:
            expression = static_expression(self.source, op)
        elif type(op) is Given:
            expression = f"given[{op.number}]"
        elif not inline and deserves_a_function(parts, number, op, in_loop=self._loops > 0):
            name, taken = self.builders.part(number)
            self.lines.append(f"x{number} = {name}({self.leaves}, {self.start}{self.count}, given)")
            self.count += taken
            self.has_calls = True
            expression = f"x{number}"
        else:
            assert type(op) is Node
            below: list[str] = []
            for start, stop in runs(parts, self.builders.records, number):
                if stop - start > 1 and op.type.cls in (list, tuple):
                    made = self._loop(children[start:stop])
                    if op.type.cls is list and stop - start == len(children):
                        self.builders.variable_of[number] = made
                        return made
                    below.append(f"*{made}")
                    continue
                for i in range(start, stop):
                    child = children[i]
                    is_first = (number, i) in parts.is_first
                    below.append(self.visit(child) if is_first else self.builders.variable_of[child])
            expression = put_together(self.source, self.lines, op, below)
        self.builders.variable_of[number] = expression
        return expression

    def _loop(self, children: Sequence[int]) -> str:
        """Builds equal closed parts that lie side by side into a list; returns its variable."""
        made = self.source.variable()
        outer, self.builders.variable_of = self.builders.variable_of, {}
        body = _Building(self.builders, "", "", self._loops + 1)
        body.visit(children[0], inline=True)
        result = self.builders.variable_of[children[0]]
        self.builders.variable_of = outer
        count, names = len(children), body.variables
        if body.has_calls or len(names) > _MOST_VARIABLES or self._loops == MAX_LOOPS:
            name, taken = self.builders.part(children[0])
            start = f"{self.start}{self.count}"
            at = f"range({start}, {start} + {taken * count}, {taken})" if taken else f"[0] * {count}"
            self.lines.append(f"{made} = [{name}({self.leaves}, at, given) for at in {at}]")
            self.count += taken * count
            self.has_calls = True
        else:
            some = self._take(len(names) * count)
            several = f"{', '.join(names)} in zip(*[iter({some})] * {len(names)})"
            each = f"_ in range({count})" if not names else f"{names[0]} in {some}" if len(names) == 1 else several
            lines = [*body.lines, f"{made}.append({result})"]
            self.lines += [f"{made} = []", f"for {each}:", *indented(lines)]
        for i, child in enumerate(children):
            self.builders.variable_of[child] = f"{made}[{i}]"
        return made


_MOST_VARIABLES = 100  # that one loop takes at a time


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
    elif is_namedtuple(cls):
        expression = f"{source.constant(cls, 'Class')}({listed})"
    elif cls is dict and all(type(name) is str for name in op.aux.peek()):
        pairs = zip(op.aux.peek(), below, strict=True)
        expression = f"{{{', '.join(f'{name!r}: {value}' for name, value in pairs)}}}"
    else:
        put = source.constant(op.type.put_together, "put")
        expression = f"{put}({static_expression(source, op.aux)}, [{listed}])"
    lines.append(f"{made} = {expression}")
    return made


_setters: dict[type, Any] = {}


def _setter(cls: type) -> Any:
    """One bound descriptor method for each class, so that equal code names equal constants."""
    return _setters.setdefault(cls, dict_descriptor(cls).__set__)
