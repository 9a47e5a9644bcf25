"""Ties by hand: list them, make them, undo them, give one tree those of another, compare two trees."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ._context import pack_alone
from ._distinct import another
from ._errors import SharingMismatchError
from ._graph import LEAF, Node, Op, Path, Record, Structure, build, canonical, edges
from ._marking import ask, stand_ins
from ._node_types import carries_identity, require_registered
from ._sharing import Agree, LostTie, Mismatch, Shape, lost_ties, matching, merged, pairs, shape_of
from ._statics import Static
from ._untying import note_untied

T = TypeVar("T")


class Tie(NamedTuple):
    """One object at two or more paths.

    Attributes:
        paths: where it is, the representative first, each printed as `jax.tree_util.keystr` prints it.
        kind: `"array"`, `"module"` or `"container"`.
        shape: of an array, else None.
        dtype: of an array, else None.
        nbytes: what it holds, in bytes, each array once; PRNG keys count with the bits of their data.
    """

    paths: tuple[str, ...]
    kind: Literal["array", "module", "container"]
    shape: tuple[int, ...] | None
    dtype: Any
    nbytes: int


class _Read(NamedTuple):
    """A tree taken apart for work on its ties."""

    structure: Structure
    leaf_of: dict[int, Any]  # record → traced leaf

    @property
    def shape(self) -> Shape:
        return shape_of(self.structure)


def _read(tree: Any) -> _Read:
    require_registered(tree)
    leaves, structure = pack_alone(tree)
    numbers = [number for number, (op, _) in enumerate(structure.records) if op is LEAF]
    return _Read(structure, dict(zip(numbers, leaves, strict=True)))


def _paths(structure: Structure) -> dict[int, list[str]]:
    paths: dict[int, list[str]] = {}
    for number, path in edges(structure.records, [((), structure.root)]):
        paths.setdefault(number, []).append(jtu.keystr(path))
    return paths


def ties(tree: Any) -> tuple[Tie, ...]:
    """The ties of a tree, in the order of their representatives.

    Only maximal ties are listed: what is tied because the module around it is tied is not listed again. A path that
    leads through a tied module is named through the representative of that module.

    Args:
        tree: a module, or any container of modules and arrays; all of it counts as inside a module.

    Raises:
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` is an object that cannot be taken apart.

    Cost: one walk over the nodes, however many paths there are. Nothing is copied.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones((2, 3))
        >>> st.ties({"embed": w, "head": w})
        (Tie(paths=("['embed']", "['head']"), kind='array', shape=(2, 3), dtype=dtype('float32'), nbytes=24),)
    """
    read = _read(tree)
    return tuple(
        _describe(read, number, tuple(paths)) for number, paths in _paths(read.structure).items() if len(paths) > 1
    )


def _describe(read: _Read, number: int, paths: tuple[str, ...]) -> Tie:
    op = read.structure.records[number][0]
    if type(op) is Node:
        below = {i for i, _ in edges(read.structure.records, [((), number)])}
        nbytes = sum(_nbytes(leaf) for i, leaf in read.leaf_of.items() if i in below)
        return Tie(paths, "container" if op.type.is_plain else "module", None, None, nbytes)
    leaf = read.leaf_of[number]
    return Tie(paths, "array", tuple(leaf.shape), leaf.dtype, _nbytes(leaf))


def _nbytes(leaf: Any) -> int:
    if not carries_identity(leaf):
        return np.asarray(leaf).nbytes
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return data.size * data.dtype.itemsize
    return int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize


def tie(tree: T, where: Callable[[T], Any]) -> T:
    """Makes several nodes of a tree one object.

    Args:
        tree: the tree; it is not changed.
        where: takes the tree and returns the nodes to make one, as a sequence. The first is kept, wherever the others
            were. It is called on a stand-in without values.

    Returns:
        A new tree with new nodes, whose arrays are the same objects as those of `tree`.

    Raises:
        SharingMismatchError: if the nodes differ in class, statics, shape or dtype, or if `where` returns fewer than
            two, or what is not in the tree.

    Cost: two walks over the nodes. Nothing is copied.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> tied = st.tie({"a": jnp.zeros(2), "b": jnp.ones(2)}, lambda m: (m["a"], m["b"]))
        >>> tied["a"] is tied["b"], tied["b"]
        (True, Array([0., 0.], dtype=float32))
    """
    read = _read(tree)
    targets, _ = ask(where, stand_ins(read.structure.records), read.structure.root)
    if len(targets) < 2:
        raise SharingMismatchError(
            f"`where` returned {len(targets)} node, and a tie needs two or more:\n"
            "    sharedtree.tie(model, lambda m: (m.embed.weight, m.head.weight))"
        )
    keep, *others = targets
    for other in others:
        _require_interchangeable(read, keep, other)
    instead = dict.fromkeys(others, keep)

    def expand(number: int) -> tuple[Op, Sequence[int]]:
        op, children = read.structure.records[number]
        return op, [instead.get(child, child) for child in children]

    records, numbers = canonical(read.structure.root, expand)
    return _built(records, [read.leaf_of[number] for number in numbers if number in read.leaf_of])


def _built(records: Sequence[Record], leaves: Sequence[Any]) -> Any:
    table: list[Any] = []
    build(records, leaves, table)
    return table[-1]


def _require_interchangeable(read: _Read, keep: int, other: int) -> None:
    """Raises unless two records of a tree could be one object."""
    records = read.structure.records

    def agree(i: int, j: int) -> bool:
        (op, _), (op2, _) = records[i], records[j]
        if op is LEAF and op2 is LEAF:
            return _kind_of(read.leaf_of[i]) == _kind_of(read.leaf_of[j])
        return type(op) is Static and op == op2

    for pair in pairs(Shape(records, keep), Shape(records, other), agree):
        if isinstance(pair, Mismatch) or (type(records[pair.left][0]) is Node and _aux_differs(records, pair)):
            paths = _paths(read.structure)
            ends = [paths[number][0] + jtu.keystr(pair.path) for number in (keep, other)]
            here, there = (_describe_end(read, keep, pair.path), _describe_end(read, other, pair.path))
            raise SharingMismatchError(
                f"`{ends[0]}` and `{ends[1]}` cannot be one object: the first is {here}, the second {there}.\n"
                "Tied nodes have one class, one set of statics, one shape and one dtype. To use one array in two "
                "shapes, tie what has the same shape and reshape where it is used:\n"
                "    logits = x @ model.embed.weight.T",
                ends,
            )


def _aux_differs(records: Sequence[Record], pair: Any) -> bool:
    return records[pair.left][0] != records[pair.right][0]


def _describe_end(read: _Read, number: int, path: Path) -> str:
    for key in path:
        op, children = read.structure.records[number]
        assert type(op) is Node
        number = children[op.keys.index(key)]
    op = read.structure.records[number][0]
    if op is LEAF:
        leaf = read.leaf_of[number]
        return f"{leaf.dtype}{list(leaf.shape)}" if carries_identity(leaf) else repr(leaf)
    if type(op) is Node:
        return f"a `{op.type.cls.__name__}` with static data {op.aux.peek()!r}"
    return f"the static value {op.peek()!r}"  # pyright: ignore[reportAttributeAccessIssue]


def _kind_of(leaf: Any) -> Any:
    if carries_identity(leaf):
        return tuple(leaf.shape), leaf.dtype
    return type(leaf)


def untie(tree: T, where: Callable[[T], Any] | None = None) -> T:
    """Undoes ties: each path gets an object of its own.

    Inside a transform this also says that the loss of these ties is meant, so that no `UntiedWarning` follows.

    Args:
        tree: the tree; it is not changed.
        where: takes a twin of the tree in which nothing is tied and returns the nodes to part from their ties, one or
            a sequence; what is tied within such a node stays so. Default: every tie is undone.

    Returns:
        A new tree with new nodes. Arrays that part are copied, the others are the same objects.

    Raises:
        SharingMismatchError: if `where` returns what is not in the tree.

    Cost: the number of paths, which for nested ties is more than that of nodes; and the bytes of the copies.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> loose = st.untie({"a": w, "b": w, "c": w}, lambda m: m["c"])
        >>> loose["a"] is loose["b"], loose["a"] is loose["c"]
        (True, False)

    Limitations: the first path of a tie keeps the array of `tree`, so donating the result donates that array.
    """
    read = _read(tree)
    twin, origin = _unfolded(read.structure)
    targets = set(range(len(twin)) if where is None else ask(where, stand_ins(twin), len(twin) - 1)[0])
    owner: list[int | None] = [None] * len(twin)  # the innermost target around each record of the twin
    for number in range(len(twin) - 1, -1, -1):
        if number in targets:
            owner[number] = number
        for child in twin[number][1]:
            owner[child] = owner[number]
    is_above = [False] * len(twin)  # of a target: it can no longer be one with its other occurrences
    for number, (_, children) in enumerate(twin):
        is_above[number] = any(child in targets or is_above[child] for child in children)

    table: list[Any] = []
    made: dict[Any, Any] = {}
    used: set[int] = set()
    copies: list[Any] = []
    for number, (op, children) in enumerate(twin):
        name = number if is_above[number] else (owner[number], origin[number])
        if name not in made:
            if op is LEAF:
                leaf = read.leaf_of[origin[number]]
                if origin[number] in used and carries_identity(leaf):
                    leaf = another(leaf)
                    copies.append(leaf)
                used.add(origin[number])
                made[name] = leaf
            elif type(op) is Node:
                made[name] = op.type.put_together(op.aux.thaw(), [table[child] for child in children])
            else:
                assert type(op) is Static
                made[name] = op.thaw()
        table.append(made[name])
    lost = _lost(read.structure, _read(table[-1]).structure)
    note_untied(((jtu.keystr(tie.paths[0]), jtu.keystr(tie.paths[1])) for tie in lost), copies)
    return table[-1]


def _unfolded(structure: Structure) -> tuple[list[Record], list[int]]:
    """The records of the twin in which nothing is tied, and for each the record of the tree that it is."""
    origin: list[int] = []
    twin: list[Record] = []
    finished: list[int] = []
    stack: list[tuple[int, bool]] = [(structure.root, False)]
    while stack:
        number, done = stack.pop()
        op, children = structure.records[number]
        if children and not done:
            stack.append((number, True))
            stack.extend((child, False) for child in reversed(children))
            continue
        below = finished[len(finished) - len(children) :]
        del finished[len(finished) - len(children) :]
        finished.append(len(twin))
        twin.append((op, tuple(below)))
        origin.append(number)
    return twin, origin


def retie(tree: T, like: Any) -> T:
    """Gives a tree the ties of another one, keeping for each tie the object at its first path.

    The way back after `jax.tree.map`, `optax.apply_updates` or a checkpoint without ties.

    Args:
        tree: the tree; it is not changed. Ties that it has and `like` lacks are kept.
        like: a tree of the same shape. Where it has a leaf, `tree` may have any subtree, `None` included, so a
            gradient or an optimizer state can be retied like its model.

    Returns:
        A new tree with new nodes, whose arrays are the same objects as those of `tree`.

    Raises:
        SharingMismatchError: if the shapes differ, or if nodes that should be one differ in statics, shape or dtype.

    Cost: one walk over the nodes of both. Nothing is copied.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> tied = {"a": w, "b": w}
        >>> doubled = st.retie(jax.tree.map(lambda x: 2 * x, tied), like=tied)
        >>> doubled["a"] is doubled["b"]
        True

    Limitations: values are not compared, since they may be tracers; what the later paths held is dropped.
    """
    read, model = _read(tree), _read(like)
    groups: dict[int, list[int]] = {}
    for pair in matching(read.shape, model.shape, _prefix(model.shape)):
        groups.setdefault(pair.right, []).append(pair.left)
    for group in groups.values():
        for number in group[1:]:
            _require_interchangeable(read, group[0], number)
    records, numbers = merged(read.shape, groups.values())
    return _built(records, [read.leaf_of[number] for number in numbers if number in read.leaf_of])


def _prefix(model: Shape) -> Agree:
    """Agrees wherever the right side, `model`, has a leaf, a static value or a None."""

    def agree(_: int, number: int) -> bool:
        op, children = model.records[number]
        return type(op) is not Node or (op.type.cls is type(None) and not children)

    return agree


def _either_prefix(left: Shape, right: Shape) -> Agree:
    in_left, in_right = _prefix(left), _prefix(right)
    return lambda i, j: in_right(i, j) or in_left(j, i)


def _lost(a: Structure, b: Structure) -> list[LostTie]:
    left, right = shape_of(a), shape_of(b)
    lost = lost_ties(left, right, _either_prefix(left, right))
    if isinstance(lost, Mismatch):
        raise lost.error()
    return [t for t in lost if _can_be_tied(a.records[t.record][0])]


def _can_be_tied(op: Op) -> bool:
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
        sharedtree._errors.SharingMismatchError: The trees do not have the same ties:
            `[0]` and `[1]` are one object in the first tree only
        Give the second the ties of the first:
            b = sharedtree.retie(b, like=a)
    """
    left, right = _read(a).structure, _read(b).structure
    lines: list[str] = []
    paths: list[str] = []
    for first, second, which in ((left, right, "first"), (right, left, "second")):
        for lost in _lost(first, second):
            one, two = map(jtu.keystr, lost.paths)
            lines.append(f"    `{one}` and `{two}` are one object in the {which} tree only")
            paths += [path for path in (one, two) if path not in paths]
    if lines:
        advice = "Give the second the ties of the first:\n    b = sharedtree.retie(b, like=a)"
        raise SharingMismatchError("\n".join(["The trees do not have the same ties:", *lines, advice]), paths)


def count_parameters(tree: Any) -> int:
    """The number of trainable numbers in a tree: the elements of its inexact traced leaves, each tied one once.

    Args:
        tree: a module, or any container of modules and arrays. Abstract arrays count.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones((2, 3))
        >>> st.count_parameters({"embed": w, "head": w, "step": jnp.array(0)})
        6
    """
    return sum(
        int(np.prod(jnp.shape(leaf), dtype=np.int64)) if not carries_identity(leaf) else _size(leaf)
        for leaf in _read(tree).leaf_of.values()
        if is_inexact(leaf)
    )


def _size(leaf: Any) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64))


def is_inexact(leaf: Any) -> bool:
    """Whether a traced leaf can be differentiated: floating-point or complex, a Python number included."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
    return jnp.issubdtype(dtype, np.inexact)
