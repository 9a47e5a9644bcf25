"""Results in the shape of the arguments: gradients, blocks of Jacobians, whatever a transform hands back of its own.

What the function returned and what the transform made in the shape of the arguments count their records from two
different starts, so they are told apart by the class of the node: the results of the function are `Packed`, and what
stands for a module among the arguments is a *like*: an `Operand`, all of whose leaves the transform sees, or a
`Differentiated`, of which it sees the inexact ones. A Jacobian nests them. For `f(m) = {"y": N(…)}`, with a module `m`
of two leaves and a module `N` of one, `jax.jacfwd` makes

    {"y": Packed([Differentiated([dN.w/dm.a, dN.w/dm.b])])}

and `jax.hessian` of a scalar function `Differentiated([Differentiated([…]), Differentiated([…])])`. Here every one of
these becomes a module again, from the inside out, with the ties of the module that it is like.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax import tree_util as jtu

from .._distinct import distinct
from .._errors import SharingMismatchError
from .._graph import build
from .._node_types import node_type_of
from .._packed import LeafPath, Packed, aux_of, leaf_paths, structure_in, with_keys
from .._statics import Static
from .._structure import LEAF, Record, Structure, reached_outside
from .._tied_values import note_tied_values
from .._untying import hand_on, note
from ._crossing import Argument, Call, is_container, is_packed


class Operand(Packed):
    """A packed module among the arguments, of a transform that may hand back something like it."""

    __slots__ = ()


class Differentiated:
    """A packed module whose children are the leaves to differentiate; the other leaves ride in the aux data.

    The aux data is compared by identity. That is enough for a transform that is applied anew on every call.
    """

    __slots__ = ("leaves", "rest")

    def __init__(self, leaves: Sequence[Any], rest: "Rest") -> None:
        self.leaves = leaves
        self.rest = rest

    @classmethod
    def of(cls, packed: Packed, can_be_differentiated: Callable[[Any], bool], call: Call) -> "Differentiated":
        """Splits a packed module. A leaf outside modules, in a container, is the transform's to accept or to refuse.

        One that it would refuse may be tied to an argument before it, which is not differentiated and so has it. It is
        added, for the transform to see.
        """
        records, root, base = packed.structure.records, packed.structure.root, packed.structure.base
        outside = reached_outside(call.records, root) if is_container(packed) else {}
        earlier = [number for number in sorted(outside) if number < base and call.records[number][0] is LEAF]
        objects = call.tags.objects
        refused = [objects[number] for number in earlier if not can_be_differentiated(objects[number])]
        numbers = [number for number, (op, _) in enumerate(records, base) if op is LEAF]
        chosen = [
            number in outside or can_be_differentiated(leaf)
            for number, leaf in zip(numbers, packed.leaves, strict=True)
        ]
        own = [leaf for leaf, yes in zip(packed.leaves, chosen, strict=True) if yes]
        return cls([*own, *refused], Rest(packed, chosen))

    def packed(self, *, others: bool) -> Packed:
        """The module packed again, with its other leaves, or with None in their place."""
        own = iter(self.leaves)
        each = zip(self.rest.packed.leaves, self.rest.chosen, strict=True)
        return Packed(
            [next(own) if yes else leaf if others else None for leaf, yes in each], self.rest.packed.structure
        )

    def keyed(self) -> list[tuple[LeafPath, Any]]:
        """The leaves with their paths."""
        texts = zip(leaf_paths(self.rest.packed.structure), self.rest.chosen, strict=True)
        own = [LeafPath(text) for text, yes in texts if yes]
        refused = [LeafPath("")] * (len(self.leaves) - len(own))
        return list(zip([*own, *refused], self.leaves, strict=True))


class Rest:
    """What of a module is not differentiated."""

    __slots__ = ("chosen", "packed")

    def __init__(self, packed: Packed, chosen: Sequence[bool]) -> None:
        self.packed = packed
        self.chosen = chosen


jtu.register_pytree_with_keys(
    Operand,
    lambda item: (with_keys(item.leaves, item.structure), aux_of(item.structure)),
    lambda aux, leaves: Operand(tuple(leaves), structure_in(aux)),
    lambda item: (item.leaves, aux_of(item.structure)),
)

jtu.register_pytree_with_keys(
    Differentiated,
    lambda item: (item.keyed(), item.rest),
    lambda rest, leaves: Differentiated(tuple(leaves), rest),
    lambda item: (item.leaves, item.rest),
)


def as_operands(tree: Any) -> Any:
    """A packed argument with an `Operand` for each packed module."""
    return jtu.tree_map(
        lambda item: Operand(item.leaves, item.structure) if type(item) is Packed else item, tree, is_leaf=is_packed
    )


def as_entered(tree: Any) -> Any:
    """The inverse: an argument as the transform hands it to the function, with each like packed again."""

    def entered(item: Any) -> Any:
        if type(item) is Differentiated:
            return item.packed(others=True)
        return Packed(item.leaves, item.structure) if type(item) is Operand else item

    return jtu.tree_map(entered, tree, is_leaf=_is_like)


def unpack_likes(
    result: Any,
    arguments: Sequence[Argument],
    *,
    statics: bool,
    given: Callable[[Sequence[Structure]], Callable[[int], Any]] | None = None,
    update: Callable[[int, Any], Any] | None = None,
) -> Any:
    """Unpacks what a transform returned, at every depth.

    Args:
        result: what it returned.
        arguments: of the call, in the order in which they were packed.
        statics: whether what is like an argument has the static leaves of the argument; gradients have None there.
        given: as in `unpack_result`, for what the function returned.
        update: likewise.

    Raises:
        SharingMismatchError: if the transform kept a part of the function's results, and another part shares an object
            with what it left out.
    """
    items, treedef = jtu.tree_flatten(result, is_leaf=_is_node)
    if not any(map(_is_node, items)):
        return result

    def inside(leaf: Any) -> Any:
        """A leaf, which may be a tree with nodes of its own."""
        if node_type_of(leaf) is None:
            return leaf
        return unpack_likes(leaf, arguments, statics=statics, given=given, update=update)

    def place(
        group: Sequence[tuple[int, Packed]], structures: Iterable[Structure], objects: Any = None, *, is_like: bool
    ) -> None:
        """Builds the modules of one numbering, in order, and puts them in their places."""
        own = iter(distinct([inside(leaf) for _, packed in group for leaf in packed.leaves]))
        leaves_of = {packed.structure: [next(own) for _ in packed.leaves] for _, packed in group}
        table: list[Any] = []
        for structure in structures:
            _require_no_gap(structure, len(table))
            table.extend([None] * (structure.base - len(table)))
            leaves = leaves_of.get(structure, [None] * structure.num_leaves)
            if is_like:
                hand_on(originals[structure], leaves)
            note(leaves[i] for i in structure.noted)
            note_tied_values(leaves[i] for i in structure.tied_values)
            records = _without_statics(structure.records) if is_like and not statics else structure.records
            build(records, leaves, table, objects, update)
        for i, packed in group:
            items[i] = table[packed.structure.root]

    originals = {argument.structure: argument.packed.leaves for argument in arguments}
    for group in _groups([(i, _packed(item)) for i, item in enumerate(items) if _is_like(item)]):
        place(group, [argument.structure for argument in arguments], is_like=True)
    for group in _groups([(i, item) for i, item in enumerate(items) if type(item) is Packed]):
        structures = sorted({packed.structure for _, packed in group}, key=lambda structure: structure.base)
        place(group, structures, given and given(structures), is_like=False)
    return treedef.unflatten(items)


def _is_like(item: Any) -> bool:
    return type(item) in (Operand, Differentiated)


def _is_node(item: Any) -> bool:
    return type(item) in (Packed, Operand, Differentiated)


def _packed(item: Any) -> Packed:
    return item.packed(others=False) if type(item) is Differentiated else item


def _groups(nodes: Sequence[tuple[int, Packed]]) -> Iterator[list[tuple[int, Packed]]]:
    """Cuts nodes into runs that were packed in one numbering: in one, no two begin to count at one number."""
    group: list[tuple[int, Packed]] = []
    starts: set[int] = set()
    for i, packed in nodes:
        start = packed.structure.base
        if start in starts:
            yield group
            group, starts = [], set()
        if packed.structure.records:
            starts.add(start)
        group.append((i, packed))
    if group:
        yield group


def _require_no_gap(structure: Structure, start: int) -> None:
    """Raises if a structure refers to records before it that were not built."""
    if start == structure.base:
        return
    numbers = [child for _, children in structure.records for child in children if child < structure.base]
    if structure.root < structure.base or any(number >= start for number in numbers):
        raise SharingMismatchError(
            "The transform returned a part of what the function returned, and an object in it is shared with a part "
            "that was left out. Let the function return what belongs together as one value:\n"
            "    return sharedtree.Dag((model, shared))"
        )


def _without_statics(records: Sequence[Record]) -> list[Record]:
    return [(_NONE, ()) if type(op) is Static else (op, children) for op, children in records]


_NONE = Static(None)
