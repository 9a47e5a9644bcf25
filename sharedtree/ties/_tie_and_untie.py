"""Ties by hand: make them, undo them, give one tree those of another, copy a tree with them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..core._by_identity import IdentityDict
from ..core._distinct_leaves import another
from ..core._errors import SharingMismatchError
from ..core._flat_dags import FlatDag
from ..core._node_types import is_value_of_variable
from ..core._pack_and_unpack import build
from ..core._printing import shown
from ..core._sharing import matching, merged
from ..core._static_values import Static
from ..core._structure import LEAF, Node, Op, Record, canonical, edges
from ..core._traced_leaves_and_identity import carries_identity
from ._interchangeable import require_interchangeable
from ._leaf_notes import hand_on, note, note_tied, note_ties
from ._list_ties import prefix_of, read_tree
from ._ties_that_are_missing import kind_of
from ._where_functions import WhereTree, require_where

T = TypeVar("T")


def tie(tree: T, where: Callable[[T], Any], *, through: Callable[..., Any] | None = None) -> T:
    """Makes several nodes of a tree one object, or one array of a tree a function of others.

    Args:
        tree: the tree; it is not changed.
        where: takes the tree and returns the nodes to make one, as a sequence. The first is kept, wherever the others
            were. It is called on the tree and on a stand-in whose leaves have no values, and must name the same nodes,
            so it cannot look at leaves.
        through: a function of arrays, such as `jnp.transpose`. The last node that `where` returns becomes a
            `sharedtree.View`, which stands for `through` of the others. A named function, or a partial of one.

    Returns:
        A new tree with new nodes, whose arrays are the same objects as those of `tree`.

    Raises:
        SharingMismatchError: if the nodes differ in class, statics, shape or dtype, if one is the array in a variable
            of Flax NNX, or if `where` returns fewer than two, or what is not in the tree, or depends on leaves. With
            `through`, if it does not return the shape and dtype of the last node.
        TypeError: if `where` is no function, as when the two are in the wrong order, or `through` is none.

    Cost: two walks over the nodes. Nothing is copied. `through` is traced once for its shape, and not run.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> tied = st.tie({"a": jnp.zeros(2), "b": jnp.ones(2)}, lambda m: (m["a"], m["b"]))
        >>> tied["a"] is tied["b"], tied["b"]
        (True, Array([0., 0.], dtype=float32))
        >>> through = st.tie({"a": jnp.zeros((2, 3)), "b": jnp.ones((3, 2))}, lambda m: (m["a"], m["b"]),
        ...                  through=jnp.transpose)
        >>> through["b"]
        View(transpose, float32[2, 3])
    """
    require_where(where, tree, "    model = sharedtree.tie(model, lambda m: (m.embed.weight, m.head.weight))")
    read = read_tree(tree)
    targets, is_single = WhereTree(read).named_by(where)
    op, children = read.records[targets[0]] if is_single else (LEAF, ())
    if type(op) is Node and op.type.is_plain:  # a sequence of nodes that the tree itself holds
        targets = list(children)
    if len(targets) < 2:
        raise SharingMismatchError(
            f"`where` returned {'1 node' if targets else '0 nodes'}, and a tie needs two or more:\n"
            "    sharedtree.tie(model, lambda m: (m.embed.weight, m.head.weight))"
        )
    if through is not None:
        return _tied_through(read, targets, through)
    _require_no_values(read, targets)
    keep, *others = targets
    for other in others:
        require_interchangeable(read, keep, other)
    instead = dict.fromkeys(others, keep)

    def expand(number: int) -> tuple[Op, Sequence[int]]:
        op, children = read.records[number]
        return op, [instead.get(child, child) for child in children]

    records, numbers = canonical(read.root, expand)
    made = _with_leaves(records, numbers, read)
    note_ties(made, [numbers[keep]])
    return _built(made)


def _tied_through(read: FlatDag, targets: Sequence[int], through: Callable[..., Any]) -> Any:
    """The tree with a view in the place of the last target."""
    # Programs without views do not import them.
    from ._views import with_view

    if not callable(through):
        raise TypeError(
            f"`through` is a function of arrays, not {shown(through)}:\n"
            "    model = sharedtree.tie(model, lambda m: (m.embed.weight, m.head.weight), through=jnp.transpose)"
        )
    _require_no_values(read, targets, ", through=through")
    *sources, target = targets
    records, numbers = with_view(read, sources, target, through)
    made = _with_leaves(records, numbers, read)
    note_ties(made, [numbers[source] for source in sources])
    return _built(made)


def _with_leaves(records: Sequence[Record], numbers: Mapping[Any, int], read: FlatDag) -> FlatDag:
    """What was made of a tree, with its leaves; `numbers` are the new ones of its records."""
    leaves = {new: read.leaves[old] for old, new in numbers.items() if old in read.leaves}
    return FlatDag(records, len(records) - 1, leaves)


def _built(tree: FlatDag) -> Any:
    table: list[Any] = []
    build(tree.records, list(tree.leaves.values()), table)
    return table[-1]


def _require_no_values(read: FlatDag, targets: Sequence[int], arguments: str = "") -> None:
    """Raises if one of what is to be tied is the value of a variable of NNX. `arguments` follow in the fix."""
    records = read.records
    holders = {
        children[0]: number
        for number, (op, children) in enumerate(records)
        if type(op) is Node and op.type.convention == "variable" and is_value_of_variable(read.leaves.get(children[0]))
    }
    if not any(number in holders for number in targets):
        return
    paths = read.all_paths
    named = [paths[number][0] for number in targets]
    variables = ", ".join([f"m{paths[holders.get(number, number)][0]}" for number in targets])
    raise SharingMismatchError(
        f"{' and '.join(f'`{name}`' for name in named)} cannot be made one: to Flax NNX the array in a variable is its "
        "value, and two variables with one array are two. Tie the variables:\n"
        f"    model = sharedtree.tie(model, lambda m: ({variables}){arguments})",
        named,
    )


def untie(tree: T, where: Callable[[T], Any] | None = None) -> T:
    """Undoes ties: each path gets an object of its own.

    This also says that the loss of these ties is meant, so that no `UntiedWarning` follows: of what is returned, and
    of what `st.tree` and transforms make of it. So does `untie` of a tree whose ties are gone already, as after
    `jax.tree.map` or `equinox.tree_at`, which hand nothing on.

    Args:
        tree: the tree; it is not changed.
        where: takes the tree and returns the nodes to part from their ties, one or a sequence; what is tied within
            such a node stays so. To learn which of the paths of a tie is meant, it is called on a twin of the tree in
            which nothing is tied and leaves have no values, too. It must name the same nodes there, so it cannot look
            at leaves. Default: every tie is undone.

    Returns:
        A new tree with new nodes. Arrays that part are copied, the others are the same objects. The first path of
        a tie keeps its array.

    Raises:
        SharingMismatchError: if `where` returns what is not in the tree, or nothing, or depends on leaves.

    Cost: the number of paths, which for nested ties is more than that of nodes; and the bytes of the copies.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> loose = st.untie({"a": w, "b": w, "c": w}, lambda m: m["c"])
        >>> loose["a"] is loose["b"], loose["a"] is loose["c"]
        (True, False)

    Limitations: the first path of a tie keeps the array of `tree`, so donating the result donates that array.
    """
    if where is not None:
        require_where(where, tree, "    model = sharedtree.untie(model, lambda m: m.head.weight)")
    read = read_tree(tree)
    twin, origin = _unfolded(read)
    if where is None:
        targets = set(range(len(twin)))
    else:
        unfolded = FlatDag(twin, len(twin) - 1, [read.objects[number] for number in origin])
        targets = set(WhereTree(unfolded).named_by(where).records)
        if not targets:
            raise SharingMismatchError(
                "`where` returned no node, so no tie would be undone.\n"
                "Return the nodes that get an object of their own, or undo every tie:\n"
                "    model = sharedtree.untie(model)"
            )
    owner: list[int | None] = [None] * len(twin)  # the innermost target around each record of the twin
    for number in range(len(twin) - 1, -1, -1):
        if number in targets:
            owner[number] = number
        for child in twin[number][1]:
            owner[child] = owner[number]
    is_above = [False] * len(twin)  # of a target: it can no longer be one with its other occurrences
    for number, (_, children) in enumerate(twin):
        is_above[number] = any(child in targets or is_above[child] for child in children)

    names = [number if is_above[number] else (owner[number], origin[number]) for number in range(len(twin))]
    becomes: dict[int, set[Any]] = {}  # leaf of the tree → the names of what becomes of it
    for number, (op, _) in enumerate(twin):
        if op is LEAF:
            becomes.setdefault(origin[number], set()).add(names[number])
    parted = {number for number, several in becomes.items() if len(several) > 1}
    keepers: dict[int, Any] = {}  # leaf of the tree → the name of what keeps its array
    for number in _in_order(twin):
        if twin[number][0] is LEAF:
            keepers.setdefault(origin[number], names[number])
    table: list[Any] = []
    made: dict[Any, Any] = {}
    for number, (op, children) in enumerate(twin):
        name = names[number]
        if name not in made:
            if op is LEAF:
                leaf = read.leaves[origin[number]]
                if name != keepers[origin[number]] and carries_identity(leaf):
                    leaf = another(leaf)
                made[name] = leaf
            elif type(op) is Node:
                made[name] = op.type.put_together(op.aux.thaw(), [table[child] for child in children])
            else:
                assert type(op) is Static
                made[name] = op.thaw()
        table.append(made[name])
    meant = parted if where is not None else set(becomes)
    # Of a target whose tie is gone already, the other part is not known, but it is of the same kind.
    gone = {origin[n] for n in range(len(twin)) if where is not None and owner[n] is not None and twin[n][0] is LEAF}
    kinds = {kind_of(read.leaves[number]) for number in gone - parted}
    meant |= {number for number in becomes if kind_of(read.leaves[number]) in kinds}
    note(table[number] for number, (op, _) in enumerate(twin) if op is LEAF and origin[number] in meant)
    return table[-1]


def _in_order(twin: Sequence[Record]) -> Sequence[int]:
    """The records in the order of their paths; what is below views comes last."""
    if not any(type(op) is Node and op.type.is_view for op, _ in twin):
        return range(len(twin))
    return [number for number, _ in edges(twin, [((), len(twin) - 1)])]


def _unfolded(tree: FlatDag) -> tuple[list[Record], list[int]]:
    """The records of the twin in which nothing is tied, and for each the record of the tree that it is."""
    origin: list[int] = []
    twin: list[Record] = []
    finished: list[int] = []
    stack: list[tuple[int, bool]] = [(tree.root, False)]
    while stack:
        number, done = stack.pop()
        op, children = tree.records[number]
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

    Paths through views come last.

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
    read, model = read_tree(tree), read_tree(like)
    groups: dict[int, list[int]] = {}
    for pair in matching(read, model, prefix_of(model), compares_keys=True):
        groups.setdefault(pair.right, []).append(pair.left)
    for group in groups.values():
        for number in group[1:]:
            require_interchangeable(read, group[0], number)
    records, numbers = merged(read, groups.values())
    made = _with_leaves(records, numbers, read)
    # The lowest record of each group is left, which a view may come first to. The object to keep is another one then.
    order = {number: place for place, number in enumerate(read.first_paths)}
    for group in groups.values():
        if read.records[group[0]][0] is LEAF:
            kept = min(group, key=order.__getitem__)
            made.leaves.update({numbers[number]: read.leaves[kept] for number in group if number in numbers})
    tied = {numbers[number] for group in groups.values() if len(group) > 1 for number in group if number in numbers}
    note_ties(made, tied)
    note_tied(made, list(made.leaves.values()))
    return _built(made)


def copy(tree: T) -> T:
    """A deep copy with the same ties: new nodes and new arrays, each shared one once.

    For a second model that starts like the first and goes its own way: a target network, a teacher, a moving average.

    Args:
        tree: a module, or any container of modules and arrays; it is not changed.

    Returns:
        A new tree that shares no array and no node with `tree`. Arrays stay on their devices, with their sharding; a
        `jax.Ref` becomes a new reference to a copy of its value; under a transform the copies of tracers are tracers.
        Static values are the same objects, but for mutable ones, which are copied.

    Raises:
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` is an object that cannot be taken apart.

    Cost: one walk over the nodes, and the bytes of each array once.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> model = {"embed": w, "head": w}
        >>> target = st.copy(model)
        >>> target["embed"] is target["head"], target["embed"] is model["embed"]
        (True, False)

    Limitations: what holds arrays without being a node, such as a closure, is static and is not copied.
    """
    read = read_tree(tree)
    leaves = [another(leaf) if carries_identity(leaf) else leaf for leaf in read.leaves.values()]
    hand_on(list(read.leaves.values()), leaves)
    return _built_with_new_statics(read, leaves)


def _built_with_new_statics(read: FlatDag, leaves: Sequence[Any]) -> Any:
    """Puts a tree together from other leaves, with copies of whatever can be mutated in its static values."""
    copies, table, rest = IdentityDict[Any](), list[Any](), iter(leaves)
    for op, children in read.records:
        if op is LEAF:
            table.append(next(rest))
        elif type(op) is Node:
            table.append(op.type.put_together(op.aux.copied(copies), [table[child] for child in children]))
        else:
            assert type(op) is Static
            table.append(op.copied(copies))
    return table[read.root]
