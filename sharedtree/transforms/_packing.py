"""One crossing: arguments packed on one side of a transform and unpacked on the other, results the other way.

Plain containers stay as they are, so that positions, and with them `argnums` and `in_axes`, mean what they always
mean. Each maximal module becomes one `Packed`, and all of them share one numbering, in flatten order, keyword
arguments by name. Under `Policy(containers=True)` so does each maximal mutable container, with all that is in it. A
`jax.Ref` outside a module is packed too: two of them that are one would otherwise be an error,
and one that comes back could not be recognised.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import tree_util as jtu

from .._distinct import distinct
from .._errors import InconsistentSharingError
from .._graph import Rules, Tags, build, is_value, pack, walk
from .._jax_internals import TRACE, as_numpy
from .._native_walk import native, pack_natively, unpack_natively
from .._node_types import has_unordered_keys, is_module, node_type_of
from .._packed import Packed
from .._structure import LEAF, Node, Path, Record, Structure, Update, depth_of, edges, intern
from .._tied_values import note_tied_values
from .._under_way import CAN_RAISE, make_room
from .._untying import Said, note, say
from .._walk import raise_too_deep
from ._crossed import Argument, Graph, Names, Position, packed_in, with_packed

OUTSIDE = Rules(inside=False)


class Call(NamedTuple):
    """Packed arguments, and the objects they were packed from."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tags: Tags
    cuts: Sequence[Any] = ()
    """The `Cuts` that were made between treatments, if any."""

    is_separate: bool = False
    """Whether no argument holds an object of an earlier one. If it is False, that is not known."""

    def items(self) -> Iterator[tuple[Position, Any]]:
        """The arguments in the order in which they were packed."""
        return positions(self.args, self.kwargs)

    @property
    def modules(self) -> list[Argument]:
        """Those in all arguments, in the order in which they were packed."""
        return [module for position, value in self.items() for module in packed_in(value, position)]

    @property
    def graph(self) -> Graph:
        """All of them as one DAG."""
        return Graph(self.modules, self.tags.objects)


class Entered(NamedTuple):
    """Unpacked arguments, and what they were unpacked from."""

    args: list[Any]
    kwargs: dict[str, Any]
    graph: Graph


def positions(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Position, Any]]:
    """The arguments in the order in which they are packed."""
    yield from enumerate(args)
    yield from ((name, kwargs[name]) for name in sorted(kwargs))


def pack_tree(tree: Any, tags: Tags, rules: Rules, prefix: str) -> Any:
    """A tree with each maximal module packed, under the policy each container too, and everything else as it was."""
    if _is_object(tree, rules):
        return _packed(tree, tags, rules, prefix)
    if node_type_of(tree) is None:
        return tree
    outer = Tags()
    items, records, root = walk(tree, outer, OUTSIDE._replace(containers=rules.containers), prefix)
    depth = depth_of(records)
    if not make_room(depth):
        raise_too_deep(OUTSIDE, prefix, depth - 1)
    if not any(_is_object(item, rules) for item in items):
        return tree
    first: dict[int, Path] = {}
    for number, path in edges(records, [((), root)]):
        first.setdefault(number, path)
    at = [first[number] for number, (op, _) in enumerate(records) if op is LEAF]
    packed = [pack_tree(item, tags, rules, prefix + jtu.keystr(path)) for item, path in zip(items, at, strict=True)]
    table: list[Any] = []
    build(records, packed, table)
    return table[root]


def require_room_for(tree: Any, name: str) -> None:
    """Makes room for what is to be flattened without having been packed, as the result of what is not traced again is.

    Raises:
        DepthError: if there is none.
    """
    if not CAN_RAISE:
        return  # there is as much as there was for the tree that it has the shape of
    depth, level = 0, [tree]
    while level:
        depth += 1
        level = [each for node in level for each in _contained(node)]
    if not make_room(depth):
        raise_too_deep(OUTSIDE, name, depth - 1)


def _contained(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, (list, tuple)) else ()


def _is_object(obj: Any, rules: Rules) -> bool:
    node_type = node_type_of(obj)
    return isinstance(obj, jax.Ref) if node_type is None else not is_value(node_type, rules)


def _packed(obj: Any, tags: Tags, rules: Rules, prefix: str) -> Any:
    if is_module(obj) or isinstance(obj, jax.Ref):
        return Packed(*pack(obj, tags, rules, prefix))
    packed = Packed(*pack(obj, tags, rules._replace(convention="any"), prefix))
    if any(type(op) is Node and has_unordered_keys(op.type, op.aux.peek()) for op, _ in packed.structure.records):
        require_room_for(obj, prefix)
        jtu.tree_flatten(obj, is_leaf=is_module)  # raises JAX's own error, unless they are inside modules
    return packed


def pack_call(
    args: Sequence[Any], kwargs: dict[str, Any], static: Collection[Position], rules: Rules, names: Names
) -> Call:
    """Packs all arguments but the static ones in one crossing.

    Raises:
        InconsistentSharingError: if a static argument shares an object with another one.
    """
    tags = Tags()
    natively = None if static else pack_natively(tuple(args), kwargs, tags, rules)
    if natively is not None:
        packed_args, packed_kwargs, is_separate = natively
        return Call(packed_args, packed_kwargs, tags, (), is_separate)
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
        build(argument.structure, [as_numpy(leaf) for leaf in argument.packed.leaves], table)
    unpacked = dict(positions(args, kwargs))
    unpacked |= {position: with_objects(value, table) for position, value in dynamic}
    graph = Graph(arguments, table)
    return Entered([unpacked[i] for i in range(len(args))], {name: unpacked[name] for name in kwargs}, graph)


def modules_of(records: Sequence[Record], roots: Iterable[int], objects: Sequence[Any]) -> list[Packed]:
    """The records of one numbering as packed modules, each with the records that the ones before it have not.

    Args:
        records: as a walk would number them.
        roots: of the modules, in order.
        objects: what the records stand for.
    """
    packed: list[Packed] = []
    base = 0
    for root in roots:
        stop = max(base, root + 1)
        own = tuple(records[base:stop])
        leaves = [obj for obj, (op, _) in zip(objects[base:stop], own, strict=True) if op is LEAF]
        packed.append(Packed(leaves, intern(own, root, base)))
        base = stop
    return packed


def tags_of(objects: Iterable[Any]) -> Tags:
    """Objects under the numbers of their places."""
    tags = Tags()
    for obj in objects:
        tags.add(obj, tag=False)
    return tags


def with_objects(tree: Any, table: Sequence[Any]) -> Any:
    """A packed tree with each packed module replaced by the object that was built for it."""
    return with_packed(tree, lambda packed: table[packed.structure.root])


def unpack_result(
    result: Any,
    given: Callable[[Sequence[Structure]], Callable[[int], Any]],
    update: Callable[[int, Any], Any] | None = None,
    pending: list[Any] | None = None,
) -> Any:
    """The inverse of packing a result: new nodes, but for those that the structures take from the caller.

    Args:
        result: a packed tree.
        given: the structures in it → what their numbers stand for.
        update: number, new content → the object that gets it.
        pending: may get such objects, each followed by its content, instead of calling `update`.
    """
    if update is None or pending is not None:
        made = unpack_natively(result, given, pending)
        if made is not NotImplemented:
            return made
    require_room_for(result, "result")
    found = [argument.packed for argument in packed_in(result, 0)]
    if not found:
        return result
    leaves = distinct([leaf for packed in found for leaf in packed.leaves])
    objects = given([packed.structure for packed in found])
    table: list[Any] = []
    start = 0
    for packed in found:
        stop = start + len(packed.leaves)
        build(packed.structure, leaves[start:stop], table, objects, update)
        note(leaves[start + i] for i in packed.structure.noted)
        note_tied_values(leaves[start + i] for i in packed.structure.tied_values)
        start = stop
    if any(packed.structure.noted for packed in found):
        records = [record for packed in found for record in packed.structure.records]
        say(Said(table, [(op.node if type(op) is Update else op, children) for op, children in records], table))
    return with_objects(result, table)


if native is not None:
    native.cross(lambda tree, tags, rules: pack_tree(tree, tags, rules, ""), Call, *TRACE)
