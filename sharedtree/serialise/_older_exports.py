"""Programs that were exported before calls were dealt in hands.

In them each outermost module in the arguments and in the results is a node of its own, and all of them have one
numbering: the records of each start where those of the one before it end, and a number below that start refers to an
object in an earlier one. The leaves are the same, in the same order. So a call is taken apart as it is today, and its
leaves are put into the program's own tree.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util as jtu

from ..core._call_arguments import Arguments
from ..core._distinct_leaves import distinct
from ..core._errors import FormatError
from ..core._pack_and_unpack import Rules, Tags, build, pack
from ..core._structure import Op, Structure, intern
from ..transforms._hands import Hand


class Packed:
    """An outermost module in the trees of such a program."""

    __slots__ = ("leaves", "structure")

    def __init__(self, leaves: Sequence[Any], structure: Structure) -> None:
        self.leaves = leaves
        self.structure = structure


jtu.register_pytree_node(
    Packed, lambda item: (item.leaves, item.structure), lambda structure, leaves: Packed(tuple(leaves), structure)
)


def _is_packed(item: Any) -> bool:
    return type(item) is Packed


def stand_in() -> jax.ShapeDtypeStruct:
    """What stands for a traced leaf where a structure is written."""
    return jax.ShapeDtypeStruct((), np.bool_)


def malformed() -> FormatError:
    """The error for what is no structure."""
    return FormatError("The structure of an exported program is malformed: it is damaged, or was made by hand.")


def written_before_hands(structure: Structure, written: Callable[[Op], Op]) -> Any:
    """A structure as such a program has it: with a marker for each object that an earlier one has."""
    reached = {structure.root, *(number for _, children in structure.records for number in children)}
    outer = sorted(number for number in reached if number < structure.base)
    table: list[Any] = [None] * structure.base
    for number in outer:
        table[number] = jax.ShapeDtypeStruct((number,), np.int8)
    records = [(written(op), children) for op, children in structure.records]
    build(records, [stand_in() for _ in range(structure.num_leaves)], table)
    earlier = tuple([table[number] for number in outer])
    return table[structure.root], earlier, structure.base, structure.noted, structure.tied_values


def structure_before_hands(found: tuple[Any, ...], read: Callable[[Op, int], Op]) -> Structure:
    """The inverse of `written_before_hands`.

    Raises:
        FormatError: if that is none.
    """
    if len(found) != 5 or not all(type(found[i]) is tuple for i in (1, 3, 4)):
        raise malformed()
    tree, earlier, base, *noted = found
    tags = Tags()
    for one in earlier:
        tags.add(one, tag=True)
    numbers = [one.shape[0] for one in earlier if type(one) is jax.ShapeDtypeStruct and len(one.shape) == 1]
    leaves, known = pack(tree, tags)
    are_places = all(type(mark) is int and 0 <= mark < len(leaves) for marks in noted for mark in marks)
    is_base = type(base) is int and base >= 0 and all(number < base for number in numbers)
    if not is_base or len(numbers) != len(earlier) or not are_places:
        raise malformed()
    numbers += range(base, base + len(known.records))
    records = [(read(op, len(children)), children) for op, children in known.records]
    records = tuple([(op, tuple([numbers[child] for child in children])) for op, children in records])
    return intern(records, numbers[known.root], base, None, *noted)


def structure_of_arguments(in_tree: Any) -> Structure:
    """The structure of the arguments that a program takes, of whichever age.

    Raises:
        FormatError: if it is malformed.
    """
    args, kwargs = in_tree.unflatten([stand_in() for _ in range(in_tree.num_leaves)])
    if args and all(type(arg) is Hand for arg in args):
        return args[0].structure
    args, kwargs = put_together((args, kwargs))
    names = tuple([f"args[{i}]" for i in range(len(args))])
    return pack(Arguments(names, args, kwargs), Tags(), Rules(convention="outside"))[1]


def put_together(tree: Any) -> Any:
    """A tree of such a program with its modules.

    Raises:
        FormatError: if it is malformed.
    """
    items, treedef = jtu.tree_flatten(tree, is_leaf=_is_packed)
    # JAX sorts keywords, and they were packed in the order in which they were given.
    found = sorted(filter(_is_packed, items), key=lambda item: item.structure.base)
    leaves = iter(distinct([leaf for item in found for leaf in item.leaves]))
    table: list[Any] = []
    for item in found:
        structure = item.structure
        if structure.base != len(table) or structure.num_leaves != len(item.leaves):
            raise malformed()
        build(structure, [next(leaves) for _ in item.leaves], table)
    return treedef.unflatten([table[item.structure.root] if _is_packed(item) else item for item in items])
