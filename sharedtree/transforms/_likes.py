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

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax import tree_util as jtu

from .._distinct import distinct
from .._errors import SharingMismatchError
from .._graph import build
from .._node_types import node_type_of
from .._packed import Packed, with_keys
from .._statics import Static
from .._structure import Record, Structure
from .._tied_values import note_tied_values
from .._untying import hand_on, note
from .._whole_gradients import note_tied
from ._crossed import Argument, is_packed
from ._differentiated import Differentiated


class Operand(Packed):
    """A packed module among the arguments, of a transform that may hand back something like it."""

    __slots__ = ()


jtu.register_pytree_with_keys(
    Operand,
    lambda item: (with_keys(item.leaves, item.structure), item.structure),
    lambda structure, leaves: Operand(tuple(leaves), structure),
    lambda item: (item.leaves, item.structure),
)


def as_operands(tree: Any) -> Any:
    """A packed argument with an `Operand` for each packed module."""
    return jtu.tree_map(
        lambda item: Operand(item.leaves, item.structure) if type(item) is Packed else item, tree, is_leaf=is_packed
    )


def as_entered(tree: Any, others: Iterable[Iterable[Any]] = itertools.repeat(itertools.repeat(None))) -> Any:
    """The inverse of that and of `split`: a tree with each like packed again.

    Args:
        tree: as the transform hands it to the function, or made in its shape.
        others: for each `Differentiated`, the leaves that are not, and for each None what it is instead; without them,
            None in their place.
    """
    rest = iter(others)

    def entered(item: Any) -> Any:
        if type(item) is Differentiated:
            return item.packed(next(rest))
        if item is None:
            return next(iter(next(rest)))
        return Packed(item.leaves, item.structure) if type(item) is Operand else item

    return jtu.tree_map(entered, tree, is_leaf=lambda item: item is None or _is_like(item))


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
    items, treedef = jtu.tree_flatten(result, is_leaf=is_node)
    if not any(map(is_node, items)):
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
        built: list[Record] = []
        for structure in structures:
            _require_no_gap(structure, len(table))
            table.extend([None] * (structure.base - len(table)))
            built.extend([(_NONE, ())] * (structure.base - len(built)))
            leaves = leaves_of.get(structure, [None] * structure.num_leaves)
            if is_like:
                hand_on(originals[structure], leaves)
            note(leaves[i] for i in structure.noted)
            note_tied_values(leaves[i] for i in structure.tied_values)
            records = without_statics(structure.records) if is_like and not statics else structure.records
            build(records, leaves, table, objects, update)
            built.extend(records)
        if is_like:
            note_tied(built, [packed.structure.root for _, packed in group], dict(enumerate(table)))
        for i, packed in group:
            items[i] = table[packed.structure.root]

    originals = {argument.structure: argument.packed.leaves for argument in arguments}
    for group in _groups([(i, item) for i, item in enumerate(items) if _is_like(item)]):
        place([(i, as_entered(item)) for i, item in group], [a.structure for a in arguments], is_like=True)
    for group in _groups([(i, item) for i, item in enumerate(items) if type(item) is Packed]):
        structures = sorted({packed.structure for _, packed in group}, key=lambda structure: structure.base)
        place(group, structures, given and given(structures), is_like=False)
    return treedef.unflatten(items)


def _is_like(item: Any) -> bool:
    return type(item) in (Operand, Differentiated)


def is_node(item: Any) -> bool:
    """Whether it stands for a module."""
    return type(item) in (Packed, Operand, Differentiated)


def _groups(nodes: Sequence[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
    """Cuts nodes into runs that were packed in one numbering: in one, no two begin to count at one number.

    A module that is all of an earlier argument has no number of its own, so what is `Differentiated` is told by its
    place, which is the same in all blocks of a Jacobian, and another one for each argument.
    """
    group: list[tuple[int, Any]] = []
    starts: set[int] = set()
    for i, item in nodes:
        start = item.choice.place if type(item) is Differentiated else _start(item.structure)
        if start in starts:
            yield group
            group, starts = [], set()
        if start is not None:
            starts.add(start)
        group.append((i, item))
    if group:
        yield group


def _start(structure: Structure) -> int | None:
    """The number at which a structure begins to count, if it has records."""
    return structure.base if structure.records else None


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


_NONE = Static(None)


def without_statics(records: Sequence[Record], static: Static = _NONE) -> list[Record]:
    """Records with None, or something else, for each static leaf: those of a gradient."""
    return [(static, ()) if type(op) is Static else (op, children) for op, children in records]
