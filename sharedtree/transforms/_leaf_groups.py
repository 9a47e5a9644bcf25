"""Leaf groups: the traced leaves of a tree, each once, grouped by what a transform does with them.

    f(Net(w, b), x)     in_axes=(Net(0, None), 0)      groups  [w, x] and [b]      under   in_axes=(0, None)

A transform of JAX gets the leaf groups as its arguments, in place of the user's tree. For JAX, a leaf group is a node
whose children are the leaves. Its auxiliary data, which JAX compares, is a `LeafSelection`: the structure of the whole
tree, and the positions of the leaves that are in this group. The whole tree can be built from all of its groups.

A transform that differentiates returns the group that it differentiated, with gradients as leaves. From this group a
tree of the arguments' shape is built, with None for leaves of other groups and for static values:

    f(Net(w, [w, 3]), x)     groups [x] and [w]      gradient [g]      Net(g, [g, None])

A Jacobian nests groups: at each leaf of the function's result it has such a group. A Hessian nests groups twice: each
leaf of these groups is a group again.

A *record* is the number of an object in a flat DAG or a structure. A `Given` stands for an object of the caller in a
result, and an `Update` for one with new content.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import tree_util as jtu

from ..core._call_arguments import Arguments, LeafPath
from ..core._jax_internals import TRACE, ConcreteArray
from ..core._pack_and_unpack import build, native, unpack
from ..core._sharing import with_repeats_copied, with_tied_numbers_as_arrays
from ..core._static_values import Static
from ..core._structure import FlatDag, Given, Record, Structure, Update, leaf_paths, with_paths
from ..ties._leaf_notes import hand_on, note_gradient, note_tied
from ..ties._policy_and_context import DEFAULT, Policy, current_policy


class _PythonSelection:
    """The base class of `LeafSelection` without the C extension. Otherwise it is a class in C with the same fields."""

    __slots__ = ("call", "numbers", "structure")

    def __init__(self, structure: Structure, numbers: tuple[int, ...] | None = None, call: Any = None) -> None:
        self.structure = structure
        self.numbers = numbers
        self.call = call

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.structure is other.structure and self.numbers == other.numbers

    def __hash__(self) -> int:
        return hash((self.structure, self.numbers))


class LeafSelection(_PythonSelection if TYPE_CHECKING or native is None else native.LeafSelection):
    """The choice of leaves of a structure that form one group: the auxiliary data of the group.

    JAX compares it on every call. Two selections are equal if they select the same leaves of the same structure.

    Args:
        structure: structure of the whole tree.
        numbers: positions of the selected leaves among the leaves of the structure. None for all.
        call: the caller's side of the running call, for a trace of the function to read. None if there is none, or if
            the call has ended. It is not compared.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"LeafSelection({self.structure!r}, {'all' if self.numbers is None else self.numbers})"

    def __reduce__(self) -> Any:
        return LeafSelection, (self.structure, self.numbers)

    @property
    def num_leaves(self) -> int:
        """Number of selected leaves."""
        return len(self.positions)

    @property
    def positions(self) -> Sequence[int]:
        """Positions of the selected leaves, also if they are all."""
        return range(self.structure.num_leaves) if self.numbers is None else self.numbers


class _PythonGroup:
    """The base class of `LeafGroup` without the C extension. Otherwise that is a class in C with the same fields."""

    __slots__ = ("leaves", "selection")
    leaves: Sequence[Any]
    selection: LeafSelection


class LeafGroup(_PythonGroup if TYPE_CHECKING or native is None else native.LeafGroup):
    """Leaves of a tree that are one argument, or one result, of a transform.

    Args:
        leaves: the leaves. Their number is not checked.
        selection: the structure of the whole tree, and the positions of the leaves in it.
    """

    __slots__ = ()

    def __init__(self, leaves: Sequence[Any], selection: LeafSelection) -> None:
        self.leaves = leaves
        self.selection = selection

    @property
    def structure(self) -> Structure:
        """Structure of the whole tree."""
        return self.selection.structure

    @property
    def paths(self) -> list[str]:
        """Paths of the leaves in the whole tree, as text."""
        return self._select(leaf_paths(self.selection.structure))

    @property
    def operand(self) -> int:
        """Position of the operand that holds the leaves of this group. The operands are the children of the root.

        All leaves of the group must be in one operand. It is 0 for a group without leaves, and for one that has all
        leaves of the tree.
        """
        tree, numbers = FlatDag.of(self.structure), self.selection.numbers
        if not numbers:
            return 0
        first_leaf = tree.leaf_numbers[numbers[0]]
        num_operands = len(tree.records[tree.root][1])
        return next(position for position in range(num_operands) if first_leaf in tree.child(position).reached)

    def named(self, names: Sequence[str]) -> "LeafGroups":
        """Returns a node with the same leaves and other paths, for JAX's messages.

        The node is a `LeafGroups`, because that class takes the keys of its children as they are given. Here its
        children are leaves, and not groups.

        Args:
            names: names with which the paths begin, such as the parameters of a function. There is one for each child
                of the root, in order. If there are too few names, the paths of the last children begin with their old
                keys.
        """
        tree = FlatDag.of(self.structure)
        root = tree.node(tree.root)
        assert root is not None
        # First key of a path → the key that takes its place.
        first_key = dict(zip(root.keys, map(LeafPath, names), strict=False))
        paths = [tree.first_paths[number] for number in tree.leaf_numbers]
        texts = [jtu.keystr((first_key.get(path[0], path[0]), *path[1:])) for path in paths]
        return LeafGroups(self.leaves, self._select(texts))

    def _select(self, all_paths: list[str]) -> list[str]:
        """Selects the paths of the leaves in this group from the paths of all leaves of the tree."""
        numbers = self.selection.numbers
        return all_paths if numbers is None else [all_paths[number] for number in numbers]

    @property
    def is_tree(self) -> bool:
        """True if `tree` can build the tree: the group has all leaves, and no object of the caller is in the tree."""
        records = self.selection.structure.records
        return self.selection.numbers is None and all(type(op) not in (Given, Update) for op, _ in records)

    def tree(self) -> Any:
        """Builds the whole tree with new nodes. Requires `is_tree`."""
        return unpack(self.selection.structure, self.leaves)

    def __repr__(self) -> str:
        # JAX prints the result of a function in its errors. So a group prints as the user's tree or, if the tree cannot
        # be built, as its leaves.
        return repr(self.tree()) if self.is_tree else f"…({', '.join(map(str, self.leaves))})"


class LeafGroups:
    """A pytree node with the leaf groups of one result. In an option such as `out_axes`, it has their labels instead.

        out_axes = LeafGroups((0, None))        fits the result        LeafGroups((group_0, group_1))

    Args:
        parts: the groups. In an option, one label for each group.
        names: for each part, its name in the paths of JAX's messages. Empty to leave this node out of the paths.
    """

    __slots__ = ("names", "parts")

    def __init__(self, parts: Sequence[Any], names: Sequence[str] = ()) -> None:
        self.parts = parts
        # An empty name is printed as nothing.
        self.names = names or [""] * len(parts)


# The functions for JAX: flatten with a key for each child, unflatten, and flatten without keys, which is faster.
jtu.register_pytree_with_keys(
    LeafGroups,
    lambda groups: (with_paths(groups.parts, groups.names), None),
    lambda _, parts: LeafGroups(tuple(parts)),
    lambda groups: (tuple(groups.parts), None),
)


def groups_of(result: Any) -> Sequence[LeafGroup]:
    """Returns the leaf groups of a result as a transform returns it: one group, or `LeafGroups` of several."""
    return result.parts if type(result) is LeafGroups else (result,)


def single_group(leaves: Sequence[Any], structure: Structure) -> LeafGroup:
    """Makes one group of all leaves of a tree.

    Args:
        leaves: the leaves in flatten order.
        structure: structure of the tree.
    """
    return LeafGroup(leaves, LeafSelection(structure))


def gather_leaves(groups: Sequence[LeafGroup], ungrouped: Sequence[Any] = ()) -> list[Any]:
    """Returns the leaves of a tree in flatten order, from its groups.

    Args:
        groups: groups of one tree, at least one.
        ungrouped: leaves in no group, in flatten order. They fill the places that the groups leave empty. If there are
            too few of them, the last places get None.
    """
    selection = groups[0].selection
    # The usual case: `None` says that the first group has all leaves.
    if selection.numbers is None:
        return list(groups[0].leaves)
    leaves: list[Any] = [None] * selection.structure.num_leaves
    # Positions of the leaves that are in no group.
    missing = set(range(len(leaves)))
    for group in groups:
        for number, leaf in zip(group.selection.numbers or (), group.leaves, strict=True):
            leaves[number] = leaf
            missing.discard(number)
    # Not strict: there may be fewer ungrouped leaves than places.
    for number, leaf in zip(sorted(missing), ungrouped, strict=False):
        leaves[number] = leaf
    return leaves


# Tells the C extension which classes and functions to use for calls. It expects them in this order.
if native is not None:
    native.take_over(
        "calls",
        ConcreteArray,
        LeafGroup,
        LeafSelection,
        Arguments,
        LeafGroups,
        vars(LeafGroups)["parts"],
        *TRACE,
        Policy,
        DEFAULT,
        current_policy,
    )
# The functions for JAX: flatten with keys, unflatten, flatten without keys. Those in C do the same as the lambdas.
jtu.register_pytree_with_keys(
    LeafGroup,
    lambda group: (with_paths(group.leaves, group.paths), group.selection),
    (lambda selection, leaves: LeafGroup(tuple(leaves), selection)) if native is None else native.group_of,
    (lambda group: (group.leaves, group.selection)) if native is None else native.group_parts,
)


_NONE = Static(None)
"""The operation of a static leaf None."""


def without_statics(records: Sequence[Record]) -> list[Record]:
    """Returns a table of records with the static leaf None in place of each static leaf, as in a gradient."""
    return [(_NONE, ()) if type(op) is Static else (op, children) for op, children in records]


def tree_like_arguments(
    groups: Sequence[LeafGroup],
    originals: Sequence[Any] = (),
    nested: Callable[[Any], Any] = lambda leaf: leaf,
    *,
    is_gradient: bool = True,
) -> Any:
    """Builds a tree of the arguments' shape and sharing from groups with new leaves, such as gradients.

    Where the arguments have a static value, or a leaf that is in none of the groups, the tree has None.

    Args:
        groups: groups with the new leaves, at least one. They have the selections of the arguments' groups.
        originals: the leaves of the arguments, in order. Their notes (such as that a tie was undone on purpose) are
            copied to the new leaves. Empty to copy no notes.
        nested: (leaf of a group) → the subtree to put in its place. For Jacobians, whose leaves are groups again.
        is_gradient: True if each new leaf is the sum over all paths of the original. It is then noted as such a sum, so
            that it counts once if a derivative rule returns it at two paths.
    """
    structure = groups[0].selection.structure
    records = without_statics(structure.records)
    # Under `jax.jit`, JAX returns one tracer for several equal cotangents. That is no tie, so `with_repeats_copied`
    # copies all but the first one. The copies then go back into their groups, one after the other.
    new_leaves = iter(with_repeats_copied([nested(leaf) for group in groups for leaf in group.leaves]))
    groups = [LeafGroup([next(new_leaves) for _ in group.leaves], group.selection) for group in groups]
    tree = FlatDag(records, structure.root)
    # A leaf of a tie must carry identity, which a NumPy number does not. `with_tied_numbers_as_arrays` makes arrays of
    # such numbers.
    leaves = with_tied_numbers_as_arrays(gather_leaves(groups), tree)
    if originals:
        hand_on(originals, leaves)
    if is_gradient:
        note_tied(tree, leaves)
        note_gradient(leaves)
    # `build` appends the object of each record.
    table: list[Any] = []
    build(records, leaves, table)
    return table[structure.root]


def tangents_of(group: LeafGroup, *, is_gradient: bool = True) -> Any:
    """Builds the tree of tangents for a derivative rule.

    JAX's tangent of an integer has the dtype float0. Outside modules it stays in the tree, as in JAX. In modules it
    becomes None, as in Equinox.

    Args:
        group: a tangent for each leaf of the tree.
        is_gradient: see `tree_like_arguments`.
    """
    structure = group.structure
    # The records outside modules: a path leads to them through plain containers alone.
    outside = FlatDag.of(structure).outside
    tangents: list[Any] = []
    for record, leaf in zip(structure.leaf_numbers, group.leaves, strict=True):
        has_no_tangent = record not in outside and getattr(leaf, "dtype", None) == jax.dtypes.float0
        tangents.append(None if has_no_tangent else leaf)
    return tree_like_arguments((LeafGroup(tangents, group.selection),), is_gradient=is_gradient)
