"""Ties by hand: list them, make them, undo them, give one tree those of another, compare two trees."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ..core._errors import SharingMismatchError
from ..core._flat_dags import FlatDag
from ..core._hidden_arrays import require_all_seen
from ..core._node_types import require_registered
from ..core._printing import MOST_PATHS, printable, shown
from ..core._sharing import Agree, Mismatch, Rooted, SplitRecord, lost_ties
from ..core._state_and_parameters import roles_in
from ..core._static_values import Static
from ..core._structure import LEAF, Node, Op
from ..core._traced_leaves_and_identity import carries_identity
from ..libraries._equinox import name_of
from ._policy_and_context import walk_exactly

T = TypeVar("T")


class Tie(NamedTuple):
    """One object at two or more paths.

    Attributes:
        paths: where it is, the representative first, each printed as `jax.tree_util.keystr` prints it.
        kind: `"array"`, `"module"` or `"container"`.
        shape: of an array, else None.
        dtype: of an array, else None.
        nbytes: what it holds, in bytes, each array once; PRNG keys count with the bits of their data.
        views: for each view that is computed from it, the place and the function: `.head.kernel =
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
    """Takes a tree apart for work on its ties."""
    require_registered(tree)
    read = walk_exactly(tree)
    require_all_seen(read.structure)
    return read


def ties(tree: Any) -> tuple[Tie, ...]:
    """The ties of a tree, in the order of their representatives.

    Only maximal ties are listed: what is tied because the module around it is tied is not listed again. A path that
    leads through a tied module is named through the representative of that module.

    Args:
        tree: a module, or any container of modules and arrays; all of it counts as inside a module.

    Raises:
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` is an object that cannot be taken apart.

    Cost: one walk over the nodes, however many paths there are, and one over those below each tie. Nothing is copied.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones((2, 3))
        >>> st.ties({"embed": w, "head": w})
        (Tie(paths=("['embed']", "['head']"), kind='array', shape=(2, 3), dtype=dtype('float32'), nbytes=24),)
    """
    read = read_tree(tree)
    views_of = _views_by_source(read)
    return tuple(
        _describe(read, number, tuple(paths), views_of.get(number, ()))
        for number, paths in read.all_paths.items()
        if len(paths) > 1
    )


def _views_by_source(read: FlatDag) -> dict[int, tuple[str, ...]]:
    """Number of an array or variable → the views that are computed from it, each with its place and function."""
    views_of: dict[int, tuple[str, ...]] = {}
    for number in [number for number, (op, _) in enumerate(read.records) if type(op) is Node and op.type.is_view]:
        text = f"{read.text(number)} = {text_of_view(read, number)}"
        for source in dict.fromkeys(sources_of_view(read, number)):
            views_of[source] = (*views_of.get(source, ()), text)
    return views_of


def sources_of_view(read: FlatDag, number: int) -> Sequence[int]:
    """The records that a view is computed from."""
    (of,) = read.records[number][1]
    return read.records[of][1]


def text_of_view(read: FlatDag, number: int) -> str:
    """The function of a view and the first paths of what it is computed from: `transpose(.embed.embedding)`."""
    op = read.records[number][0]
    assert type(op) is Node
    paths = list(map(read.text, sources_of_view(read, number)[:MOST_SOURCES]))
    if len(sources_of_view(read, number)) > MOST_SOURCES:
        paths.append("...")
    return f"{text_of_function(op.aux.peek())}({', '.join(paths)})"


MOST_SOURCES = 8
"""How many of the arrays that a view is computed from are named."""


def text_of_function(through: Any) -> str:
    """Names the function of a view: `transpose`, `swapaxes[axis1=-1, axis2=-2]`. Calls nothing."""
    arguments: list[str] = []
    while type(through) in (functools.partial, jtu.Partial):
        arguments += [*map(shown, through.args), *(f"{key}={shown(value)}" for key, value in through.keywords.items())]
        through = through.func
    name = printable(name_of(through, type(through).__name__))
    if len(arguments) > MOST_SOURCES:
        arguments[MOST_SOURCES:] = ["..."]
    return f"{name}[{', '.join(arguments)}]" if arguments else name


def _describe(read: FlatDag, number: int, paths: tuple[str, ...], views: tuple[str, ...]) -> Tie:
    op = read.records[number][0]
    if type(op) is Node:
        nbytes = sum(nbytes_of(read.leaves[i]) for i in read.below(number).reached if i in read.leaves)
        return Tie(paths, "container" if op.type.is_plain else "module", None, None, nbytes, views)
    leaf = read.leaves[number]
    return Tie(paths, "array", tuple(leaf.shape), leaf.dtype, nbytes_of(leaf), views)


def nbytes_of(leaf: Any) -> int:
    """What a traced leaf takes, in bytes; of PRNG keys, the bits of their data."""
    if not carries_identity(leaf):
        return np.asarray(leaf).nbytes
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return data.size * data.dtype.itemsize
    return int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize


def prefix_of(model: Rooted) -> Agree:
    """Agrees wherever the right side, `model`, has a leaf, a static value or a None."""

    def agree(_: int, number: int) -> bool:
        op, children = model.records[number]
        return type(op) is not Node or (op.type.cls is type(None) and not children)

    return agree


def _either_prefix(left: Rooted, right: Rooted) -> Agree:
    in_left, in_right = prefix_of(left), prefix_of(right)
    return lambda i, j: in_right(i, j) or in_left(j, i)


def _lost_between(a: Rooted, b: Rooted) -> list[SplitRecord]:
    lost = lost_ties(a, b, _either_prefix(a, b), compares_keys=True)
    if isinstance(lost, Mismatch):
        raise lost.error()
    return [t for t in lost if can_be_tied(a.records[t.record][0])]


def can_be_tied(op: Op) -> bool:
    """Whether two occurrences of what a record makes can be a tie."""
    return op is LEAF or (type(op) is Node and op.type.carries_identity)


def same_sharing(a: Any, b: Any) -> bool:
    """Whether two trees have one shape and the same ties.

    Args:
        a: a tree.
        b: another. Where one has a leaf, the other may have any subtree, `None` included, so a gradient can be
            compared with its model.

    Returns:
        True if any two paths hold one object in `a` exactly where they do in `b`. False if the shapes differ.

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
        Gradients are taken with `sharedtree.grad`, which sums over the paths, and added up with `sharedtree.tree.map`.
        Give another tree, if its values at these paths are equal, the ties of the first:
            b = sharedtree.retie(b, like=a)
    """
    left, right = read_tree(a), read_tree(b)
    lines: list[str] = []
    paths: dict[str, None] = {}
    lacking: list[str] = []
    for first, second, which in ((left, right, "first"), (right, left, "second")):
        for lost in _lost_between(first, second):
            one, two = map(jtu.keystr, lost.paths)
            lines.append(f"    `{one}` and `{two}` are one object in the {which} tree only")
            lacking += [which] if which not in lacking else []
            paths |= {one: None, two: None}
    if lines:
        if len(lines) > MOST_PATHS:
            lines[MOST_PATHS:] = [f"    … and {len(lines) - MOST_PATHS} more"]
        # Without ties of its own, each could simply get those of the other.
        other = {"first": "b", "second": "sharedtree.untie(b)"}[lacking[-1]]
        advice = (
            "Gradients are taken with `sharedtree.grad`, which sums over the paths, and added up with "
            "`sharedtree.tree.map`.\n"
            f"Give another tree, if its values at these paths are equal, the ties of the first:\n"
            f"    b = sharedtree.retie({other}, like=a)"
        )
        raise SharingMismatchError("\n".join(["The trees do not have the same ties:", *lines, advice]), tuple(paths))


def how_to_sum(name: str, like: str, *, in_containers: bool) -> str:
    """Where a gradient with ties comes from, and what keeps them when gradients are added up.

    Args:
        name: what the gradient is called in the code.
        like: what the model is called there.
        in_containers: whether what is tied is in plain containers, to which transforms give no identity of their own.
    """
    by, policy = "`sharedtree.grad`", ""
    if in_containers:
        by += ", for parameters in lists and dicts with the policy"
        policy = ", policy=sharedtree.Policy(containers=True)"
    return (
        "Functions that see trees, such as `jax.tree.map`, lose ties. What is made of trees with ties, such as a sum "
        "of gradients, keeps them with\n"
        f"    {name} = sharedtree.tree.map(jnp.add, one, other)\n"
        f"A gradient with a part for each path, as `jax.grad` returns it, must be summed. Take it with {by}:\n"
        f"    {name} = sharedtree.grad(loss{policy})({like})"
    )


def how_to_tie(name: str, like: str, *, in_containers: bool) -> str:
    """What to do about a tree that lacks ties of another one. The two parts of a gradient are not the same thing."""
    return (
        f"{how_to_sum(name, like, in_containers=in_containers)}\n"
        "Other trees, in which the parts are copies of one value, get the tie back with\n"
        f"    {name} = sharedtree.retie({name}, like={like})"
    )


def are_one_value(tree: FlatDag, i: int, j: int) -> bool:
    """Whether two records without identity, such as two Nones or two equal numbers, hold one value."""
    (op, below), (other, below2) = tree.records[i], tree.records[j]
    if op is LEAF and other is LEAF:
        has_identity = carries_identity(tree.objects[i]) or carries_identity(tree.objects[j])
        return not has_identity and Static(tree.objects[i]) == Static(tree.objects[j])
    same = op == other and len(below) == len(below2)
    return same and all(a == b or are_one_value(tree, a, b) for a, b in zip(below, below2, strict=True))


def count_parameters(tree: Any) -> int:
    """The number of trainable numbers in a tree: the elements of its inexact traced leaves, each tied one once.

    Args:
        tree: a module, or any container of modules and arrays. Abstract arrays count. What a library says is state does
            not, as for `sharedtree.optimizer`: NNX's `BatchStat` and the like, a `state_field`, an `equinox.nn.State`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones((2, 3))
        >>> st.count_parameters({"embed": w, "head": w, "step": jnp.array(0)})
        6
    """
    read = read_tree(tree)
    roles = roles_in(read)
    return sum(
        int(np.prod(jnp.shape(leaf), dtype=np.int64)) if not carries_identity(leaf) else _size(leaf)
        for number, leaf in read.leaves.items()
        if is_inexact(leaf) and not roles.is_state(number)
    )


def _size(leaf: Any) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64))


def is_inexact(leaf: Any) -> bool:
    """Whether a traced leaf can be differentiated: floating-point or complex, a Python number included."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
    return jnp.issubdtype(dtype, np.inexact)
