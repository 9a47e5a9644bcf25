"""The plain containers around modules, in generated code: checked on the way in, put together again on the way out."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .._compiled import Readers, Reading, Source, put_together
from .._graph import Tags, walk
from .._jax_internals import ConcreteArray
from .._node_types import node_type_of
from .._packed import Packed
from .._structure import LEAF, Node
from ._crossing import OUTSIDE

COMMON_BARE = frozenset({ConcreteArray, np.ndarray, bool, int, float, complex})

Trail = tuple[tuple[Callable[[Any], tuple[Sequence[Any], Any]], int], ...]
"""The way to an object: how each node on it comes apart, and which child is next."""


class Containers:
    """Lines that check the plain containers around modules, and expressions that put them together again."""

    def __init__(
        self,
        source: Source,
        lines: tuple[list[str], list[str]],
        tree: Any,
        replace: tuple[Callable[[str, Trail], str], Callable[[str, Trail], str]],
        give_up: str,
    ) -> None:
        items, self.records, self.root = walk(tree, Tags(), OUTSIDE)
        self._items: Iterator[Any] = iter(items)
        self._source = source
        self._readers = Readers(source, self.records, [self.root])
        self._checks, self._makes = lines
        self._module, self._bare = replace
        self._give_up = give_up

    def visit(self, number: int, variable: str, trail: Trail = ()) -> str:
        """Checks what a variable holds; returns an expression for it with its modules replaced."""
        op, children = self.records[number]
        if op is LEAF:
            item = next(self._items)
            return (self._module if type(item) is Packed else self._bare)(variable, trail)
        assert type(op) is Node
        if op.type.cls is type(None):
            self._checks.append(f"if {variable} is not None: {self._give_up}")
            return variable
        reading = Reading(self._readers, self._give_up)
        variables = reading.take_apart(op, children, variable)
        self._checks.extend(reading.lines)
        take_apart = op.type.take_apart
        below = [
            self.visit(child, own, (*trail, (take_apart, i)))
            for i, (child, own) in enumerate(zip(children, variables, strict=True))
        ]
        if below == variables:  # there is no module in it
            return variable
        return put_together(self._source, self._makes, op, below)


def is_bare(obj: Any) -> bool:
    """Whether an object outside modules goes to JAX as it is."""
    return node_type_of(obj) is None and not isinstance(obj, jax.Ref)
