"""One crossing: arguments packed on one side of a transform and unpacked on the other, results the other way.

Plain containers stay as they are, so that positions, and with them `argnums` and `in_axes`, mean what they always
mean. Each maximal module becomes one `Packed`, and all of them share one numbering, in flatten order, keyword
arguments by name. A `jax.Ref` outside a module is packed too: two of them that are one would otherwise be an error,
and one that comes back could not be recognised.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import tree_util as jtu

from .._distinct import distinct
from .._errors import InconsistentSharingError
from .._graph import Rules, Tags, build, pack, walk
from .._jax_internals import make_room
from .._node_types import is_module, node_type_of
from .._packed import Packed
from .._structure import LEAF, Path, Record, Structure, depth_of, edges

Position = int | str
"""A positional argument by its index, or a keyword argument by its name."""

OUTSIDE = Rules(inside=False)


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
    """What the arguments of a function are called, for paths in errors and warnings."""

    def __init__(self, function: Callable[..., Any]) -> None:
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


class Call(NamedTuple):
    """Packed arguments, and the objects they were packed from."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tags: Tags

    def items(self) -> Iterator[tuple[Position, Any]]:
        """The arguments in the order in which they were packed."""
        return positions(self.args, self.kwargs)


class Entered(NamedTuple):
    """Unpacked arguments, and what they were unpacked from."""

    args: list[Any]
    kwargs: dict[str, Any]
    table: list[Any]
    arguments: list[Argument]

    @property
    def records(self) -> list[Record]:
        """The records of all arguments; each number is a place in this list."""
        return [record for argument in self.arguments for record in argument.structure.records]


def positions(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Position, Any]]:
    """The arguments in the order in which they are packed."""
    yield from enumerate(args)
    yield from ((name, kwargs[name]) for name in sorted(kwargs))


def pack_tree(tree: Any, tags: Tags, rules: Rules, prefix: str) -> Any:
    """A tree with each maximal module packed, and everything outside modules as it was."""
    node_type = node_type_of(tree)
    if node_type is None and not isinstance(tree, jax.Ref):
        return tree
    if node_type is None or not node_type.is_plain:
        return Packed(*pack(tree, tags, rules, prefix))
    outer = Tags()
    items, records, root = walk(tree, outer, OUTSIDE, prefix)
    make_room(depth_of(records))
    if not any(is_module(item) or isinstance(item, jax.Ref) for item in items):
        return tree
    first: dict[int, Path] = {}
    for number, path in edges(records, [((), root)]):
        first.setdefault(number, path)
    at = [first[number] for number, (op, _) in enumerate(records) if op is LEAF]
    packed = [pack_tree(item, tags, rules, prefix + jtu.keystr(path)) for item, path in zip(items, at, strict=True)]
    table: list[Any] = []
    build(records, packed, table)
    return table[root]


def pack_call(
    args: Sequence[Any], kwargs: dict[str, Any], static: Collection[Position], rules: Rules, names: Names
) -> Call:
    """Packs all arguments but the static ones in one crossing.

    Raises:
        InconsistentSharingError: if a static argument shares an object with another one.
    """
    tags = Tags()
    packed = {
        position: value if position in static else pack_tree(value, tags, rules, names.text(position))
        for position, value in positions(args, kwargs)
    }
    for position in static:
        if position in packed:
            _require_separate(packed[position], tags, names.text(position))
    return Call(tuple(packed[i] for i in range(len(args))), {name: packed[name] for name in kwargs}, tags)


def _require_separate(value: Any, tags: Tags, text: str) -> None:
    if node_type_of(value) is None:
        return
    own = Tags()
    _, records, root = walk(value, own, Rules(), text)
    for number, path in edges(records, [((), root)]):
        obj = own.objects[number]
        if tags.number_of(obj) is not None and own.number_of(obj) is not None:
            where = text + jtu.keystr(path)
            raise InconsistentSharingError(
                f"`{where}` is static, but the same `{type(obj).__name__}` is also in an argument that is traced.\n"
                "Inside the function they would be two objects. Pass only one of them, or a copy as the static one:\n"
                "    f(model, copy.deepcopy(config))",
                (where,),
                ("static",),
            )


def is_packed(obj: Any) -> bool:
    """Whether an object in the arguments or results stands for a module."""
    return type(obj) is Packed


def packed_in(tree: Any, position: Position) -> Iterator[Argument]:
    """The packed modules in one argument or result, in order."""
    for path, item in jtu.tree_flatten_with_path(tree, is_leaf=is_packed)[0]:
        if type(item) is Packed:
            yield Argument(position, path, item)


def unpack_call(args: Sequence[Any], kwargs: dict[str, Any], static: Collection[Position]) -> Entered:
    """The inverse of `pack_call`, with new nodes."""
    dynamic = [(position, value) for position, value in positions(args, kwargs) if position not in static]
    # Sorted, since a transform may have turned keyword arguments into positional ones, as Equinox's do.
    arguments = sorted(
        (argument for position, value in dynamic for argument in packed_in(value, position)),
        key=lambda argument: argument.structure.base,
    )
    table: list[Any] = []
    for argument in arguments:
        build(argument.structure.records, argument.packed.leaves, table)
    unpacked = dict(positions(args, kwargs))
    unpacked |= {position: with_objects(value, table) for position, value in dynamic}
    return Entered([unpacked[i] for i in range(len(args))], {name: unpacked[name] for name in kwargs}, table, arguments)


def with_objects(tree: Any, table: Sequence[Any]) -> Any:
    """A packed tree with each packed module replaced by the object that was built for it."""
    if not any(packed_in(tree, 0)):
        return tree
    return jtu.tree_map(
        lambda item: table[item.structure.root] if type(item) is Packed else item, tree, is_leaf=is_packed
    )


def unpack_result(
    result: Any,
    given: Callable[[Sequence[Structure]], Callable[[int], Any]],
    update: Callable[[int, Any], Any] | None = None,
) -> Any:
    """The inverse of packing a result: new nodes, but for those that the structures take from the caller.

    Args:
        result: a packed tree.
        given: the structures in it → what their numbers stand for.
        update: number, new content → the object that gets it.
    """
    found = [argument.packed for argument in packed_in(result, 0)]
    if not found:
        return result
    leaves = distinct([leaf for packed in found for leaf in packed.leaves])
    objects = given([packed.structure for packed in found])
    table: list[Any] = []
    start = 0
    for packed in found:
        stop = start + len(packed.leaves)
        build(packed.structure.records, leaves[start:stop], table, objects, update)
        start = stop
    return with_objects(result, table)
