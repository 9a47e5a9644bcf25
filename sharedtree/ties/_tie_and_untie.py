"""Ties by hand: make them, undo them, give one tree those of another, copy a tree with them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..core._by_identity import IdentityDict
from ..core._errors import SharingMismatchError
from ..core._node_types import carries_identity, is_value_of_variable
from ..core._pack_and_unpack import build
from ..core._printing import shown
from ..core._sharing import another, matching, merged
from ..core._static_values import Static
from ..core._structure import LEAF, FlatDag, Node, Op, Record, canonical_records, edges
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
        where: takes the tree and returns a sequence of nodes to make one object. The first node replaces the others.
            `where` is called on the tree and on a stand-in whose leaves have no values, and must return the same nodes
            for both. So it cannot look at leaves.
        through: a function of arrays, such as `jnp.transpose`. The last node that `where` returns becomes a
            `sharedtree.View`, which stands for `through` of the others. A named function, or a partial of one.

    Returns:
        A new tree with new nodes, whose arrays are the same objects as those of `tree`.

    Raises:
        SharingMismatchError: if the nodes differ in class, statics, shape or dtype, or if one is the array in a
            variable of Flax NNX. Also if `where` returns fewer than two nodes or an object that is not in the tree, or
            if its result depends on leaves. With `through`, if `through` does not return the shape and dtype of the
            last node.
        TypeError: if `where` or `through` is no function, for example because the arguments are in the wrong order.

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
    flat = read_tree(tree)
    targets, is_single = WhereTree(flat).named_by(where)
    op, children = flat.records[targets[0]] if is_single else (LEAF, ())
    # `lambda m: m.layers` names one node, the list itself. The user means its entries.
    if type(op) is Node and op.type.is_plain:
        targets = list(children)
    if len(targets) < 2:
        raise SharingMismatchError(
            f"`where` returned {'1 node' if targets else '0 nodes'}, and a tie needs two or more:\n"
            "    sharedtree.tie(model, lambda m: (m.embed.weight, m.head.weight))"
        )
    if through is not None:
        return _tied_through(flat, targets, through)
    _require_no_values(flat, targets)
    representative, *replaced = targets
    for target in replaced:
        require_interchangeable(flat, representative, target)
    replacement_of = dict.fromkeys(replaced, representative)

    def expand(number: int) -> tuple[Op, Sequence[int]]:
        """Returns the operation of a record, and its children in the result."""
        op, children = flat.records[number]
        return op, [replacement_of.get(child, child) for child in children]

    records, new_numbers = canonical_records(flat.root, expand)
    tied = _with_leaves(records, new_numbers, flat)
    note_ties(tied, [new_numbers[representative]])
    return _built(tied)


def _tied_through(flat: FlatDag, targets: Sequence[int], through: Callable[..., Any]) -> Any:
    """Puts a view in the place of the last target, computed from the other targets."""
    # Programs without views do not import them.
    from ._views import with_view

    if not callable(through):
        raise TypeError(
            f"`through` is a function of arrays, not {shown(through)}:\n"
            "    model = sharedtree.tie(model, lambda m: (m.embed.weight, m.head.weight), through=jnp.transpose)"
        )
    _require_no_values(flat, targets, ", through=through")
    *sources, target = targets
    records, new_numbers = with_view(flat, sources, target, through)
    tied = _with_leaves(records, new_numbers, flat)
    note_ties(tied, [new_numbers[source] for source in sources])
    return _built(tied)


def _with_leaves(records: Sequence[Record], new_numbers: Mapping[Any, int], old: FlatDag) -> FlatDag:
    """Makes a flat DAG of new records, with the leaves of the old one.

    Args:
        records: the new records. The last one is the root.
        new_numbers: old number → new number, for the records that remain. Keys that are no old numbers are ignored.
        old: the tree before, with its leaves.
    """
    leaves = {new_number: old.leaves[number] for number, new_number in new_numbers.items() if number in old.leaves}
    return FlatDag(records, len(records) - 1, leaves)


def _built(flat: FlatDag) -> Any:
    """Puts the tree of a flat DAG together from its leaves."""
    table: list[Any] = []
    build(flat.records, list(flat.leaves.values()), table)
    return table[-1]


def _require_no_values(flat: FlatDag, targets: Sequence[int], further_arguments: str = "") -> None:
    """Raises an error if one of the nodes to tie is the array in a variable of Flax NNX, which carries no identity.

    Args:
        flat: the tree, with its leaves.
        targets: the nodes to tie.
        further_arguments: text that follows the arguments of `tie` in the fix.
    """
    # Number of an array → number of the variable that holds it.
    variable_of: dict[int, int] = {}
    for number, (op, children) in enumerate(flat.records):
        is_variable = type(op) is Node and op.type.convention == "variable"
        if is_variable and is_value_of_variable(flat.leaves.get(children[0])):
            variable_of[children[0]] = number
    if not any(number in variable_of for number in targets):
        return
    paths = flat.paths_of_edges
    target_paths = [paths[number][0] for number in targets]
    variables = ", ".join([f"m{paths[variable_of.get(number, number)][0]}" for number in targets])
    raise SharingMismatchError(
        f"{' and '.join(f'`{path}`' for path in target_paths)} cannot be made one: to Flax NNX the array in a variable "
        "is its value, and two variables with one array are two. Tie the variables:\n"
        f"    model = sharedtree.tie(model, lambda m: ({variables}){further_arguments})",
        target_paths,
    )


def untie(tree: T, where: Callable[[T], Any] | None = None) -> T:
    """Undoes ties: each path gets an object of its own.

    The library then knows that these ties were undone on purpose. It gives no `UntiedWarning` for the result, nor for
    trees that `st.tree` and transforms make of it. `jax.tree.map` and `equinox.tree_at` lose this note; call `untie` on
    their result again.

    Args:
        tree: the tree; it is not changed.
        where: takes the tree and returns the node to separate from its ties, or a sequence of nodes. Ties within such
            a node are kept. `where` is also called on a twin of the tree, in which nothing is tied and leaves have no
            values, to learn which path of a tie is meant. It must return the same nodes there. So it cannot look at
            leaves. Default: every tie is undone.

    Returns:
        A new tree with new nodes. The first path of a tie keeps its array, and separated paths get copies. All other
        arrays are the same objects.

    Raises:
        SharingMismatchError: if `where` returns no node or an object that is not in the tree, or if its result depends
            on leaves.

    Cost: proportional to the number of paths, which is larger than that of nodes if ties are nested. Separated arrays
    are copied.

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
    flat = read_tree(tree)
    # One record for each path. All numbers below are of the twin, unless a name says `original`.
    twin, originals = _unfolded(flat)
    if where is None:
        targets = set(range(len(twin)))
    else:
        unfolded = FlatDag(twin, len(twin) - 1, [flat.objects[original] for original in originals])
        targets = set(WhereTree(unfolded).named_by(where).records)
        if not targets:
            raise SharingMismatchError(
                "`where` returned no node, so no tie would be undone.\n"
                "Return the nodes that get an object of their own, or undo every tie:\n"
                "    model = sharedtree.untie(model)"
            )
    # For each record, the innermost target around it. Parents come after their children, so they are seen first.
    target_around: list[int | None] = [None] * len(twin)
    for number in range(len(twin) - 1, -1, -1):
        if number in targets:
            target_around[number] = number
        for child in twin[number][1]:
            target_around[child] = target_around[number]

    # A node with a target below it differs from its other occurrences from now on, so it cannot be tied to them.
    has_target_below = [False] * len(twin)
    for number, (_, children) in enumerate(twin):
        has_target_below[number] = any(child in targets or has_target_below[child] for child in children)

    # Records with one key become one object: the same original, within the same target.
    object_keys: list[Any] = []
    for number, original in enumerate(originals):
        object_keys.append(number if has_target_below[number] else (target_around[number], original))

    # A leaf of the tree is separated if it becomes several objects.
    keys_of_leaf: dict[int, set[Any]] = {}
    for number, (op, _) in enumerate(twin):
        if op is LEAF:
            keys_of_leaf.setdefault(originals[number], set()).add(object_keys[number])
    separated = {original for original, keys in keys_of_leaf.items() if len(keys) > 1}

    # Of the objects that a leaf becomes, the first one outside views keeps its array. The others get copies.
    key_that_keeps: dict[int, Any] = {}
    for number in _views_last(twin):
        if twin[number][0] is LEAF:
            key_that_keeps.setdefault(originals[number], object_keys[number])

    # Build the result.
    table: list[Any] = []
    object_of: dict[Any, Any] = {}
    for number, (op, children) in enumerate(twin):
        key = object_keys[number]
        if key not in object_of:
            if op is LEAF:
                leaf = flat.leaves[originals[number]]
                if key != key_that_keeps[originals[number]] and carries_identity(leaf):
                    leaf = another(leaf)
                object_of[key] = leaf
            elif type(op) is Node:
                object_of[key] = op.type.put_together(op.aux.thaw(), [table[child] for child in children])
            else:
                assert type(op) is Static
                object_of[key] = op.thaw()
        table.append(object_of[key])

    # Note the leaves whose ties were undone on purpose. Without `where` these are all leaves.
    intended = separated if where is not None else set(keys_of_leaf)
    # A leaf in a target may have lost its tie before. Then its former partner is unknown, so all leaves of its kind are
    # noted.
    in_targets: set[int] = set()
    if where is not None:
        for number, (op, _) in enumerate(twin):
            if op is LEAF and target_around[number] is not None:
                in_targets.add(originals[number])
    kinds = {kind_of(flat.leaves[original]) for original in in_targets - separated}
    intended |= {original for original in keys_of_leaf if kind_of(flat.leaves[original]) in kinds}
    note(table[number] for number, (op, _) in enumerate(twin) if op is LEAF and originals[number] in intended)
    return table[-1]


def _views_last(twin: Sequence[Record]) -> Sequence[int]:
    """Returns the numbers of all records in the order of their paths, those below views last."""
    # Without views the leaves of the twin are in the order of their paths already.
    if not any(type(op) is Node and op.type.is_view for op, _ in twin):
        return range(len(twin))
    return [number for number, _ in edges(twin, [((), len(twin) - 1)])]


def _unfolded(flat: FlatDag) -> tuple[list[Record], list[int]]:
    """Unfolds a DAG into a tree: its twin, in which nothing is tied.

    Returns:
        The records of the twin, children before parents, and for each the number of its original in the DAG.
    """
    originals: list[int] = []
    twin: list[Record] = []
    # Numbers of the finished records that no parent has taken yet. The children of a node are its last ones.
    finished: list[int] = []
    stack: list[tuple[int, bool]] = [(flat.root, False)]
    while stack:
        original, has_finished_children = stack.pop()
        op, children = flat.records[original]
        if children and not has_finished_children:
            stack.append((original, True))
            stack.extend((child, False) for child in reversed(children))
            continue
        twin_children = finished[len(finished) - len(children) :]
        del finished[len(finished) - len(children) :]
        finished.append(len(twin))
        twin.append((op, tuple(twin_children)))
        originals.append(original)
    return twin, originals


def retie(tree: T, like: Any) -> T:
    """Gives a tree the ties of another tree. The object at the first path of each tie replaces the others.

    Paths through views come last. Use it after `jax.tree.map`, `optax.apply_updates` or a checkpoint without ties.

    Args:
        tree: the tree; it is not changed. Ties that it has and `like` lacks are kept.
        like: a tree of the same shape. In the place of its leaves, `tree` may have any subtrees, including `None`. So a
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

    Limitations: values are not compared, because they may be tracers. The values at the later paths are dropped, even
    if they differ.
    """
    flat, model = read_tree(tree), read_tree(like)
    # For each record of the model, the records of the tree at its paths. They become one.
    groups: dict[int, list[int]] = {}
    for pair in matching(flat, model, prefix_of(model), compares_keys=True):
        groups.setdefault(pair.right, []).append(pair.left)
    for group in groups.values():
        for number in group[1:]:
            require_interchangeable(flat, group[0], number)
    records, new_numbers = merged(flat, groups.values())
    retied = _with_leaves(records, new_numbers, flat)

    # `merged` keeps the lowest record of each group. A view may reach that one before the array's own place is reached,
    # whose object is the one to keep.
    position_of = {number: position for position, number in enumerate(flat.first_paths)}
    for group in groups.values():
        if flat.records[group[0]][0] is LEAF:
            leaf = flat.leaves[min(group, key=position_of.__getitem__)]
            retied.leaves.update({new_numbers[number]: leaf for number in group if number in new_numbers})

    tied_numbers: set[int] = set()
    for group in groups.values():
        if len(group) > 1:
            tied_numbers.update(new_numbers[number] for number in group if number in new_numbers)
    note_ties(retied, tied_numbers)
    # Inside a `custom_vjp` rule: the user says by `retie` that the array at the first path is the whole gradient.
    note_tied(retied, list(retied.leaves.values()))
    return _built(retied)


def copy(tree: T) -> T:
    """Makes a deep copy with the same ties: new nodes and new arrays, each shared one once.

    Use it for a model that begins with the values of another one: a target network, a teacher, a moving average.

    Args:
        tree: a module, or any container of modules and arrays; it is not changed.

    Returns:
        A new tree that shares no array and no node with `tree`. Arrays stay on their devices, with their sharding. A
        `jax.Ref` becomes a new reference to a copy of its value. Under a transform, copies of tracers are tracers.
        Mutable static values are copied, and all others are the same objects.

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

    Limitations: objects that hold arrays and are no nodes, such as closures, are static and are not copied.
    """
    flat = read_tree(tree)
    leaves = [another(leaf) if carries_identity(leaf) else leaf for leaf in flat.leaves.values()]
    hand_on(list(flat.leaves.values()), leaves)
    return _built_with_new_statics(flat, leaves)


def _built_with_new_statics(flat: FlatDag, leaves: Sequence[Any]) -> Any:
    """Puts a tree together from new leaves. Copies the mutable parts of its static values, each shared one once."""
    copies, table, remaining_leaves = IdentityDict[Any](), list[Any](), iter(leaves)
    for op, children in flat.records:
        if op is LEAF:
            table.append(next(remaining_leaves))
        elif type(op) is Node:
            table.append(op.type.put_together(op.aux.copied(copies), [table[child] for child in children]))
        else:
            assert type(op) is Static
            table.append(op.copied(copies))
    return table[flat.root]
