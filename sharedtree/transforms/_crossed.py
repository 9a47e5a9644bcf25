"""What crosses: the packed modules in arguments and results, what they are called, and all of them as one DAG.

f(Net(w, w), [x, Layer(w)])       modules   net: Packed([w]), args[1][1]: Packed([])
graph     0: w   1: Net(0, 0)   2: Layer(0)         roots 1 and 2
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from .._attribution import definition_of
from .._node_types import node_type_of
from .._packed import LeafPath, Packed
from .._sharing import Shape
from .._statics import Static
from .._structure import LEAF, Node, Path, Structure, Update

Position = int | str
"""A positional argument by its index, or a keyword argument by its name."""


class Argument(NamedTuple):
    """A maximal module in the arguments, or in the results.

    Attributes:
        position: which argument it is in, or is.
        path: where it is in that argument.
        packed: its new leaves and its structure.
    """

    position: Position
    path: Path
    packed: Packed

    @property
    def structure(self) -> Structure:
        """Its structure."""
        return self.packed.structure


class Names:
    """What a function and its arguments are called, for errors and warnings.

    Args:
        function: the user's function.
        positional: what its arguments are called, if not as its parameters are.
    """

    def __init__(self, function: Callable[..., Any], positional: Sequence[str] | None = None) -> None:
        self.definition = definition_of(function)
        if positional is not None:
            self.positional = list(positional)
            return
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (ValueError, TypeError):
            parameters = []
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positional = [p.name for p in parameters if p.kind in by_position]

    def text(self, position: Position, path: Path = ()) -> str:
        """The path as errors print it: `model.blocks[0]`."""
        if isinstance(position, int):
            known = position < len(self.positional)
            position = self.positional[position] if known else f"args[{position}]"
        return position + jtu.keystr(path)

    def of_positions(self, positions: Sequence[int]) -> "Names":
        """Those for a call with only some of the positional arguments."""
        names = copy.copy(self)
        names.positional = [self.text(position) for position in positions]
        return names


class Graph:
    """The packed modules of one numbering as one DAG.

    Args:
        modules: in the order in which they were packed.
        objects: what the records stand for, where that is at hand.

    Attributes:
        modules: the maximal ones.
        records: of all of them; each number is a place in this list.
        objects: as given.
    """

    def __init__(self, modules: Iterable[Argument], objects: Sequence[Any] | Mapping[int, Any] = ()) -> None:
        self.modules = list(modules)
        self.records = [record for module in self.modules for record in module.structure.records]
        self.objects = objects

    @classmethod
    def of(cls, tree: Any, name: Position = 0) -> "Graph":
        """That of a packed tree; in errors its paths begin with the name."""
        return cls(packed_in(tree, name))

    @property
    def roots(self) -> list[int]:
        """The records of the modules."""
        return [module.structure.root for module in self.modules]

    @functools.cached_property
    def leaves(self) -> dict[int, Any]:
        """Record → traced leaf."""
        given = iter([leaf for module in self.modules for leaf in module.packed.leaves])
        return {number: next(given) for number, (op, _) in enumerate(self.records) if op is LEAF}

    @functools.cached_property
    def shape(self) -> Shape:
        """All of it below one node, from which paths begin with the names of trees."""
        return self.shape_named(lambda module: f"{module.position}{jtu.keystr(module.path)}")

    def shape_named(self, text: Callable[[Argument], str]) -> Shape:
        """The same with other names for the modules."""
        whole = node_type_of(())
        assert whole is not None
        top = Node(whole, Static(None), tuple([LeafPath(text(module)) for module in self.modules]))
        return Shape([*self.records, (top, tuple(self.roots))], len(self.records))


def is_packed(obj: Any) -> bool:
    """Whether an object in the arguments or results stands for a module."""
    return type(obj) is Packed


def is_container(packed: Packed) -> bool:
    """Whether what was packed is a container outside modules, and was not packed before."""
    structure = packed.structure
    op = structure.records[structure.root - structure.base][0] if structure.root >= structure.base else LEAF
    node = op.node if type(op) is Update else op
    return type(node) is Node and node.type.is_plain


def packed_in(tree: Any, position: Position) -> Iterator[Argument]:
    """The packed modules in one argument or result, in order."""
    for path, item in jtu.tree_flatten_with_path(tree, is_leaf=is_packed)[0]:
        if type(item) is Packed:
            yield Argument(position, path, item)


def with_packed(tree: Any, replace: Callable[[Packed], Any]) -> Any:
    """A packed tree with something else in place of each packed module."""
    if not any(packed_in(tree, 0)):
        return tree
    return jtu.tree_map(lambda item: replace(item) if type(item) is Packed else item, tree, is_leaf=is_packed)


def with_each(tree: Any, packed: Iterable[Any]) -> Any:
    """A packed tree with others in place of its packed modules, in order."""
    each = iter(packed)
    return with_packed(tree, lambda _: next(each))
