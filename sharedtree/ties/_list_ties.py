"""Lists the ties of a tree, compares the sharing of two trees, and counts parameters, each tied one once."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ..core._errors import SharingMismatchError
from ..core._hidden_arrays import refuse_hidden_arrays
from ..core._node_types import carries_identity, require_registered
from ..core._printing import MOST_PATHS, printable, shown
from ..core._sharing import Agree, Mismatch, Rooted, SplitRecord, lost_ties
from ..core._static_values import Static
from ..core._structure import LEAF, FlatDag, Node, Op, roles_in
from ..libraries._equinox import name_of
from ._policy_and_context import walk_exactly

T = TypeVar("T")


class Tie(NamedTuple):
    """One object at two or more paths.

    Attributes:
        paths: its paths, the representative first, each printed as `jax.tree_util.keystr` prints it.
        kind: `"array"`, `"module"` or `"container"`.
        shape: shape of an array, else None.
        dtype: dtype of an array, else None.
        nbytes: size of its arrays in bytes, each array once. PRNG keys count with the bits of their data.
        views: one text for each view computed from the object, with path and function: `.head.kernel =
            transpose(.embed.embedding)`.
    """

    paths: tuple[str, ...]
    kind: Literal["array", "module", "container"]
    shape: tuple[int, ...] | None
    dtype: Any
    nbytes: int
    views: tuple[str, ...] = ()

    def __repr__(self) -> str:
        # Most ties have no views, and are printed without.
        names = self._fields if self.views else self._fields[:-1]
        return f"Tie({', '.join([f'{name}={getattr(self, name)!r}' for name in names])})"


def read_tree(tree: Any) -> FlatDag:
    """Walks a tree for work on its ties, under the policy of this thread or task.

    Raises:
        UnregisteredTypeError: if arrays stand in an object that cannot be taken apart.
    """
    require_registered(tree)
    flat = walk_exactly(tree)
    refuse_hidden_arrays(flat.structure)
    return flat


def ties(tree: Any) -> tuple[Tie, ...]:
    """Lists the ties of a tree, in the order of their representatives.

    Only maximal ties are listed: the parts of a tied module are tied with it, and are not listed again. If such a part
    is also tied to an object outside the module, its path through the module begins with the module's representative.

    Args:
        tree: a module, or any container of modules and arrays; all of it counts as inside a module.

    Raises:
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` cannot be taken apart.

    Cost: one walk over the nodes, however many paths there are, and one over those below each tie. Nothing is copied.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones((2, 3))
        >>> st.ties({"embed": w, "head": w})
        (Tie(paths=("['embed']", "['head']"), kind='array', shape=(2, 3), dtype=dtype('float32'), nbytes=24),)
    """
    flat = read_tree(tree)
    texts_of_views = _views_by_source(flat)
    described_ties: list[Tie] = []
    for number, paths in flat.paths_of_edges.items():
        if len(paths) > 1:
            described_ties.append(_describe(flat, number, tuple(paths), texts_of_views.get(number, ())))
    return tuple(described_ties)


def _views_by_source(flat: FlatDag) -> dict[int, tuple[str, ...]]:
    """Maps the number of each array or variable to the texts of the views computed from it.

    A text has path and function, as in `Tie.views`.
    """
    views_of: dict[int, tuple[str, ...]] = {}
    for number, (op, _) in enumerate(flat.records):
        if type(op) is not Node or not op.type.is_view:
            continue
        text = f"{flat.text(number)} = {text_of_view(flat, number)}"
        for source in dict.fromkeys(sources_of_view(flat, number)):
            views_of[source] = (*views_of.get(source, ()), text)
    return views_of


def sources_of_view(flat: FlatDag, number: int) -> Sequence[int]:
    """Returns the numbers of the records that a view is computed from, its sources."""
    # The one child of a view is the tuple of its sources.
    (tuple_number,) = flat.records[number][1]
    return flat.records[tuple_number][1]


def text_of_view(flat: FlatDag, number: int) -> str:
    """Prints a view as a call: its function, with the first paths of its sources: `transpose(.embed.embedding)`."""
    op = flat.records[number][0]
    assert type(op) is Node
    paths = list(map(flat.text, sources_of_view(flat, number)[:MOST_SOURCES]))
    if len(sources_of_view(flat, number)) > MOST_SOURCES:
        paths.append("...")
    # The function is the auxiliary data of a view.
    return f"{text_of_function(op.aux.peek())}({', '.join(paths)})"


MOST_SOURCES = 8
"""Largest number of sources, or of bound arguments of a function, in the text of a view."""


def text_of_function(through: Any) -> str:
    """Prints the function of a view without calling it: `transpose`, or `swapaxes[axis1=-1, axis2=-2]` for a partial.

    Args:
        through: a function, or a `functools.partial` of one, whose bound arguments are printed in brackets.
    """
    arguments: list[str] = []
    while type(through) in (functools.partial, jtu.Partial):
        arguments += [*map(shown, through.args), *(f"{key}={shown(value)}" for key, value in through.keywords.items())]
        through = through.func
    name = printable(name_of(through, type(through).__name__))
    if len(arguments) > MOST_SOURCES:
        arguments[MOST_SOURCES:] = ["..."]
    return f"{name}[{', '.join(arguments)}]" if arguments else name


def _describe(flat: FlatDag, number: int, paths: tuple[str, ...], views: tuple[str, ...]) -> Tie:
    """Describes a tied record, with the views computed from it."""
    op = flat.records[number][0]
    if type(op) is Node:
        nbytes = sum(nbytes_of(flat.leaves[i]) for i in flat.below(number).reached if i in flat.leaves)
        return Tie(paths, "container" if op.type.is_plain else "module", None, None, nbytes, views)
    leaf = flat.leaves[number]
    return Tie(paths, "array", tuple(leaf.shape), leaf.dtype, nbytes_of(leaf), views)


def nbytes_of(leaf: Any) -> int:
    """Returns the size of a traced leaf in bytes. The size of a PRNG key is that of its data."""
    # A Python or NumPy number.
    if not carries_identity(leaf):
        return np.asarray(leaf).nbytes
    # The dtype of PRNG keys is not one of NumPy's.
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return data.size * data.dtype.itemsize
    return int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize


def prefix_of(model: Rooted) -> Agree:
    """Makes a rule for the comparison of a tree with a model: a leaf, a static value or a None matches any record.

    Args:
        model: the right side of the comparison.

    Returns:
        A function for `pairs`, which compares two DAGs: (number of a record on the left, number on the right) → True if
        the two records match although they differ.
    """

    def agree(_: int, number: int) -> bool:
        op, children = model.records[number]
        return type(op) is not Node or (op.type.cls is type(None) and not children)

    return agree


def _either_prefix(left: Rooted, right: Rooted) -> Agree:
    """Makes a rule like `prefix_of`, by which a leaf, a static value or a None of either side matches any record."""
    agree_right, agree_left = prefix_of(right), prefix_of(left)
    return lambda i, j: agree_right(i, j) or agree_left(j, i)


def _lost_between(left: Rooted, right: Rooted) -> list[SplitRecord]:
    """Finds the ties of `left` missing in `right`.

    Raises:
        SharingMismatchError: if the trees differ in shape.
    """
    # The records of `left` that are several records in `right`, or the first difference in shape.
    split_records = lost_ties(left, right, _either_prefix(left, right), compares_keys=True)
    if isinstance(split_records, Mismatch):
        raise split_records.error()
    # Tuples and None are split, too, but that is no lost tie.
    return [split for split in split_records if can_be_tied(left.records[split.record][0])]


def can_be_tied(op: Op) -> bool:
    """Returns True for a traced leaf and for a node with identity. A record with such an operation can be tied."""
    return op is LEAF or (type(op) is Node and op.type.carries_identity)


def same_sharing(a: Any, b: Any) -> bool:
    """Returns True if two trees have one shape and the same ties.

    Args:
        a: a tree.
        b: another tree. Where one has a leaf, the other may have any subtree, `None` included, so a gradient can be
            compared with its model.

    Returns:
        True if two paths lead to one object in `a` if and only if they do in `b`. False if the shapes differ.

    Cost: one walk over the nodes of both. Nothing is copied.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> st.same_sharing([w, w], [jnp.ones(2), jnp.ones(2)])
        False
    """
    try:
        assert_same_sharing(a, b)
    except SharingMismatchError:
        return False
    return True


def assert_same_sharing(a: Any, b: Any) -> None:
    """Raises unless two trees have one shape and the same ties, as `same_sharing` compares them.

    Raises:
        SharingMismatchError: with every path that is tied in one of them and not in the other.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> st.assert_same_sharing([w, w], [jnp.ones(2), jnp.ones(2)])
        Traceback (most recent call last):
        ...
        sharedtree.errors.SharingMismatchError: The trees do not have the same ties:
            `[0]` and `[1]` are one object in the first tree only
        For gradients, use `sharedtree.grad`, which sums over the paths, and `sharedtree.tree.map` to add them up.
        For other trees, if the values at these paths are equal, give the second tree the ties of the first:
            b = sharedtree.retie(b, like=a)
    """
    left, right = read_tree(a), read_tree(b)

    # Look for ties in both directions, with one line of the message for each.
    lines: list[str] = []
    distinct_paths: dict[str, None] = {}
    # "first" if the first tree has a tie that the second lacks, and "second" for the reverse.
    trees_with_more: list[str] = []
    for tree, counterpart, title in ((left, right, "first"), (right, left, "second")):
        for split in _lost_between(tree, counterpart):
            path1, path2 = map(jtu.keystr, split.paths)
            lines.append(f"    `{path1}` and `{path2}` are one object in the {title} tree only")
            trees_with_more += [title] if title not in trees_with_more else []
            distinct_paths |= {path1: None, path2: None}
    if lines:
        if len(lines) > MOST_PATHS:
            lines[MOST_PATHS:] = [f"    … and {len(lines) - MOST_PATHS} more"]
        # `retie` keeps the ties that `b` has already. If it has too many, they must be undone first.
        retied = {"first": "b", "second": "sharedtree.untie(b)"}[trees_with_more[-1]]
        advice = (
            "For gradients, use `sharedtree.grad`, which sums over the paths, and `sharedtree.tree.map` to add them "
            "up.\n"
            "For other trees, if the values at these paths are equal, give the second tree the ties of the first:\n"
            f"    b = sharedtree.retie({retied}, like=a)"
        )
        text = "\n".join(["The trees do not have the same ties:", *lines, advice])
        raise SharingMismatchError(text, tuple(distinct_paths))


def how_to_sum(name: str, like: str, *, in_containers: bool) -> str:
    """Returns advice for errors: how to take a gradient with ties, and how to add gradients up without losing them.

    Args:
        name: variable of the gradient in the suggested code.
        like: variable of the model in the suggested code.
        in_containers: True if the tied arrays stand in plain containers, so that `grad` needs a policy to tie them.
    """
    function, policy = "`sharedtree.grad`", ""
    if in_containers:
        function += ", with this policy for parameters in lists and dicts"
        policy = ", policy=sharedtree.Policy(containers=True)"
    return (
        "Functions on trees, such as `jax.tree.map`, lose ties. `sharedtree.tree.map` keeps them, for example in a sum "
        "of gradients:\n"
        f"    {name} = sharedtree.tree.map(jnp.add, one, other)\n"
        f"`jax.grad` returns a part of the gradient for each path. Their sum comes from {function}:\n"
        f"    {name} = sharedtree.grad(loss{policy})({like})"
    )


def how_to_tie(name: str, like: str, *, in_containers: bool) -> str:
    """Returns advice for errors about a tree without the ties of another tree.

    It begins with gradients, whose parts at tied paths must be summed: `retie` would drop all parts but the first.

    Args:
        name: variable of the tree in the suggested code.
        like: variable of the other tree in the suggested code.
        in_containers: True if the tied arrays stand in plain containers, see `how_to_sum`.
    """
    return (
        f"{how_to_sum(name, like, in_containers=in_containers)}\n"
        "For other trees, if the values at these paths are equal, put the tie back:\n"
        f"    {name} = sharedtree.retie({name}, like={like})"
    )


def are_one_value(tree: FlatDag, i: int, j: int) -> bool:
    """Returns True if two records hold equal values without identity, such as two Nones or two equal numbers.

    Two arrays are never one value, whatever they contain. So two containers with different arrays are not either.

    Args:
        tree: the tree, with its objects.
        i: number of a record.
        j: number of another record.
    """
    (op_i, children_i), (op_j, children_j) = tree.records[i], tree.records[j]
    if op_i is LEAF and op_j is LEAF:
        has_identity = carries_identity(tree.objects[i]) or carries_identity(tree.objects[j])
        return not has_identity and Static(tree.objects[i]) == Static(tree.objects[j])
    is_alike = op_i == op_j and len(children_i) == len(children_j)
    return is_alike and all(a == b or are_one_value(tree, a, b) for a, b in zip(children_i, children_j, strict=True))


def count_parameters(tree: Any) -> int:
    """Counts the trainable numbers of a tree: the elements of its floating-point leaves, each tied leaf once.

    Args:
        tree: a module, or any container of modules and arrays. Abstract arrays count. State, as its library defines it,
            does not, as for `sharedtree.optimizer`: NNX's `BatchStat` and its kin, a `state_field`, an
            `equinox.nn.State`, the state of an optax transformation, and all of Flax's `TrainState` but `params`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones((2, 3))
        >>> st.count_parameters({"embed": w, "head": w, "step": jnp.array(0)})
        6
    """
    flat = read_tree(tree)
    # Roles say which leaves the library of a module declares as state.
    roles = roles_in(flat)
    count = 0
    for number, leaf in flat.leaves.items():
        if is_inexact(leaf) and not roles.is_state(number):
            count += _num_elements(leaf)
    return count


def _num_elements(leaf: Any) -> int:
    """Returns the number of elements of an array, 1 for a number."""
    # A Python number has no attribute `shape`.
    shape = leaf.shape if carries_identity(leaf) else jnp.shape(leaf)
    return int(np.prod(shape, dtype=np.int64))


def is_inexact(leaf: Any) -> bool:
    """Returns True if a traced leaf, an array or a number, is floating point or complex."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
    return jnp.issubdtype(dtype, np.inexact)
