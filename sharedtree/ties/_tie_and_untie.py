"""Functions that change the ties of a tree: `tie`, `untie`, `retie`, and `copy`, which keeps them.

The end of the file has the error for two nodes that cannot be one object. It suggests what to tie instead. Layers of
two classes, or of one class with different static data, are never one object. Parts of them may be: the weight of an
embedding and that of a linear layer.

    Embedding(w1)    Linear(w2, b)      not interchangeable
    .weight   w1     .weight   w2       interchangeable if they have one shape and one dtype
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jax import tree_util as jtu

from ..core._by_identity import IdentityDict
from ..core._comparison import short_text
from ..core._errors import SharingMismatchError
from ..core._node_types import carries_identity, is_value_of_variable
from ..core._pack_and_unpack import build
from ..core._printing import shown
from ..core._sharing import Mismatch, copy_of_leaf, merge_records, pairs, pairs_of_one_shape
from ..core._static_values import Static, distinguishing_text
from ..core._structure import LEAF, FlatDag, Node, Op, Path, Record, canonical_records, edges
from ..libraries._nnx import is_hijax_variable
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
        SharingMismatchError: if the nodes differ in class, statics, shape or dtype. Also if one is the array in a
            variable of Flax NNX, or a hijax variable, or if `where` returns fewer than two nodes or an object that is
            not in the tree, or if its result depends on leaves. With `through`, if `through` does not return the shape
            and dtype of the last node, or if the last node is a parameter of Linen in an `nnx.bridge.ToNNX`.
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
    # Raises with this fix if `where` is no function.
    require_where(where, tree, "    model = sharedtree.tie(model, lambda m: (m.embed.weight, m.head.weight))")
    flat = read_tree(tree)
    # Numbers of the records that `where` returns.
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
    _require_no_hijax(flat, targets)
    if through is not None:
        return _tied_through(flat, targets, through)
    _require_no_values(flat, targets)
    representative, *replaced = targets
    # Raises if the two nodes differ in class, static data, shape or dtype.
    for target in replaced:
        require_interchangeable(flat, representative, target)
    # Build the DAG in which every edge to a replaced node leads to the first one.
    replacement_of = dict.fromkeys(replaced, representative)

    def expand(number: int) -> tuple[Op, Sequence[int]]:
        """Returns the operation of a record, and its children in the result."""
        op, children = flat.records[number]
        return op, [replacement_of.get(child, child) for child in children]

    # The new records, and old number → new number.
    records, new_numbers = canonical_records(flat.root, expand)
    tied = _with_leaves(records, new_numbers, flat)
    # Outside modules, transforms take arrays for values and lose such a tie. The note makes them warn of it.
    note_ties(tied, [new_numbers[representative]])
    return _built(tied)


def _tied_through(flat: FlatDag, targets: Sequence[int], through: Callable[..., Any]) -> Any:
    """Returns the tree with a view in the place of the last target, computed from the other targets.

    Raises:
        TypeError: if `through` is no function.
        SharingMismatchError: if the result of `through` does not fit, or one of the targets is no array.
    """
    # Imported here, so that programs without views do not import `_views`.
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
    """Makes a flat DAG of new records, with the leaves of the old one under their new numbers.

    Args:
        records: the new records. The last one is the root.
        new_numbers: old number → new number, for the remaining records. Keys that are no old numbers are ignored.
        old: the flat DAG before, with its leaves.
    """
    leaves: dict[int, Any] = {}
    for number, new_number in new_numbers.items():
        if number in old.leaves:
            leaves[new_number] = old.leaves[number]
    return FlatDag(records, len(records) - 1, leaves)


def _built(flat: FlatDag) -> Any:
    """Builds the tree of a flat DAG, from its leaves and new nodes."""
    # Object of each record. `build` appends to it.
    table: list[Any] = []
    build(flat.records, list(flat.leaves.values()), table)
    return table[-1]


def _require_no_hijax(flat: FlatDag, targets: Sequence[int]) -> None:
    """Raises `SharingMismatchError` if a node to tie is a hijax variable of Flax NNX: transforms would lose the tie."""
    paths = [flat.text(target) for target in targets if is_hijax_variable(flat.objects[target])]
    if paths:
        raise SharingMismatchError(
            f"{' and '.join(f'`{path}`' for path in paths)} cannot be tied: a hijax variable of Flax NNX is a value to "
            "transforms, and two of its paths are two values.\n"
            "Make the variable without hijax:\n"
            "    variable = nnx.Param(value, hijax=False)",
            paths,
        )


def _require_no_values(flat: FlatDag, targets: Sequence[int], further_arguments: str = "") -> None:
    """Raises an error if a node to tie is the value (the array) of a variable of Flax NNX: it carries no identity.

    Args:
        flat: the tree, with its leaves.
        targets: numbers of the nodes to tie.
        further_arguments: text after the arguments of `tie` in the fix.

    Raises:
        SharingMismatchError: with a fix that ties the variables.
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
        f"{' and '.join(f'`{path}`' for path in target_paths)} cannot be tied: for Flax NNX an array is the value of "
        "its variable, and two variables with one array are still two. Tie the variables:\n"
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
    # The twin is the tree with one record for each path, so that nothing in it is tied. All numbers in this function
    # are of the twin, unless a name says `original`.
    twin, originals = _unfolded(flat)

    # Find the targets: the records that are separated from their ties.
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

    # For each record, the innermost target that holds it or is it. Going down from the last record, each parent comes
    # before its children.
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

    # A leaf of the original tree is separated if it becomes several objects.
    keys_of_leaf: dict[int, set[Any]] = {}
    for number, (op, _) in enumerate(twin):
        if op is LEAF:
            keys_of_leaf.setdefault(originals[number], set()).add(object_keys[number])
    separated = {original for original, keys in keys_of_leaf.items() if len(keys) > 1}

    # Of the objects that a leaf becomes, the first one outside views keeps the array. The others get copies.
    key_that_keeps: dict[int, Any] = {}
    for number in _views_last(twin):
        if twin[number][0] is LEAF:
            key_that_keeps.setdefault(originals[number], object_keys[number])

    # Build the result: one object for each key.
    table: list[Any] = []
    object_of: dict[Any, Any] = {}
    for number, (op, children) in enumerate(twin):
        key = object_keys[number]
        if key not in object_of:
            if op is LEAF:
                leaf = flat.leaves[originals[number]]
                if key != key_that_keeps[originals[number]] and carries_identity(leaf):
                    leaf = copy_of_leaf(leaf)
                object_of[key] = leaf
            elif type(op) is Node:
                object_of[key] = op.type.put_together(op.aux.thaw(), [table[child] for child in children])
            else:
                assert type(op) is Static
                object_of[key] = op.thaw()
        table.append(object_of[key])

    # Note the leaves whose ties were undone on purpose, so that nothing reports them as lost. Without `where` these are
    # all leaves.
    intended = separated if where is not None else set(keys_of_leaf)
    # A leaf in a target may have lost its tie before, for example by `jax.tree.map`. Then it is unknown which other
    # leaf it was tied to, so all leaves of its shape and dtype are noted.
    originals_in_targets: set[int] = set()
    if where is not None:
        for number, (op, _) in enumerate(twin):
            if op is LEAF and target_around[number] is not None:
                originals_in_targets.add(originals[number])
    kinds = {kind_of(flat.leaves[original]) for original in originals_in_targets - separated}
    intended |= {original for original in keys_of_leaf if kind_of(flat.leaves[original]) in kinds}
    new_leaves: list[Any] = []
    for number, (op, _) in enumerate(twin):
        if op is LEAF and originals[number] in intended:
            new_leaves.append(table[number])
    note(new_leaves)
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
    # Numbers of the twin's records that have no parent yet. When a node is made, its children are the last of them.
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
        tree: the tree; it is not changed. Its ties are kept, even those missing in `like`.
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

    # For each record of the model, the records of the tree at its paths. These become one. `prefix_of` lets a leaf of
    # the model match any subtree.
    groups: dict[int, list[int]] = {}
    for pair in pairs_of_one_shape(flat, model, prefix_of(model), compares_keys=True):
        groups.setdefault(pair.right, []).append(pair.left)
    for group in groups.values():
        for number in group[1:]:
            # Raises if the two nodes differ in class, static data, shape or dtype.
            require_interchangeable(flat, group[0], number)
    # The new records, and old number → new number for the records that remain.
    records, new_numbers = merge_records(flat, groups.values())
    retied = _with_leaves(records, new_numbers, flat)

    # `merge_records` keeps the lowest record of each group. In a tree with views, that record may stand below a view.
    # The array to keep is the one at the first path, and paths through views come last.
    position_of = {number: position for position, number in enumerate(flat.first_paths)}
    for group in groups.values():
        if flat.records[group[0]][0] is LEAF:
            leaf = flat.leaves[min(group, key=position_of.__getitem__)]
            retied.leaves.update({new_numbers[number]: leaf for number in group if number in new_numbers})

    # Note the new ties, so that transforms warn if they lose one outside modules.
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
        A new tree without any array or node of `tree`. Arrays stay on their devices, with their sharding. A
        `jax.Ref` becomes a new reference to a copy of its value. Under a transform, copies of tracers are tracers.
        Mutable static values are copied, and all others are the same objects.

    Raises:
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` cannot be taken apart.

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
    # `copy_of_leaf` copies an array.
    leaves = [copy_of_leaf(leaf) if carries_identity(leaf) else leaf for leaf in flat.leaves.values()]
    # What is noted of a leaf, such as that its tie was undone on purpose, is noted of its copy.
    hand_on(list(flat.leaves.values()), leaves)
    return _built_with_new_statics(flat, leaves)


def _built_with_new_statics(flat: FlatDag, leaves: Sequence[Any]) -> Any:
    """Puts a tree together from new leaves. Copies the mutable parts of its static values, each shared one once."""
    copies, table, remaining_leaves = IdentityDict[Any](), list[Any](), iter(leaves)
    for op, children in flat.records:
        if op is LEAF:
            table.append(next(remaining_leaves))
        elif type(op) is Node:
            table.append(op.type.put_together(op.aux.copied_value(copies), [table[child] for child in children]))
        else:
            assert type(op) is Static
            table.append(op.copied_value(copies))
    return table[flat.root]


# --- nodes that cannot be one object, and what to tie instead ---------------------------------------------------------

# The largest numbers of suggested calls and of static fields in a message, and of pairs of arrays to compare for one.
_MAX_SUGGESTIONS, _MAX_FIELDS, _MAX_COMPARISONS = 4, 3, 1000


def require_interchangeable(tree: FlatDag, left: int, right: int) -> None:
    """Raises an error if two records of a tree cannot be one object. The error suggests parts of them that can.

    Args:
        tree: the tree, with its leaves.
        left: number of the record to be kept.
        right: number of the record to be replaced.

    Raises:
        SharingMismatchError: if the records, or any two records at one path below them, differ in class, static data,
            shape or dtype.
    """
    path = _first_difference(tree, left, right)
    if path is None:
        return

    # The difference may lie far below the two records. The error names its place below each of them.
    paths = tree.paths_of_edges
    left_path, right_path = (paths[number][0] + jtu.keystr(path) for number in (left, right))
    left_end, right_end = (_record_at(tree, number, path) for number in (left, right))
    fact = (
        f"`{left_path}` and `{right_path}` cannot be one object: the first is "
        f"{_described(tree, left_end, right_end)}, the second {_described(tree, right_end, left_end)}.\n"
        "Tied nodes must agree in class, static values, shape and dtype. "
    )

    # The best fix ties parts of the two records.
    parts = _interchangeable_parts(tree, left, right)
    calls: list[str] = []
    for left_part, right_part in parts:
        calls.append(f"    model = sharedtree.tie(model, lambda m: (m{paths[left_part][0]}, m{paths[right_part][0]}))")
    if calls:
        lines = [f"{fact}Tie the parts that agree:", *calls[:_MAX_SUGGESTIONS]]
        raise SharingMismatchError("\n".join(lines), [left_path, right_path])

    # Else the fix is a tie through a function.
    fix = (
        "To use one array in two shapes, tie arrays of one shape and reshape where they are used:\n"
        "    logits = x @ model.embed.weight.T"
    )
    if _are_transposed(tree, left_end, right_end):
        parameters = ", ".join([f"m{_path_of_parameter(tree, number, path)}" for number in (left, right)])
        fix = (
            "If one is the transpose of the other, tie them through a function, which computes it where it is used:\n"
            f"    model = sharedtree.tie(model, lambda m: ({parameters}), through=jnp.transpose)"
        )
    raise SharingMismatchError(f"{fact}{fix}", [left_path, right_path])


def _first_difference(tree: FlatDag, left: int, right: int) -> Path | None:
    """Returns the first path below two records at which the records there differ. None if they could be one object.

    The path is empty if the two records themselves differ.
    """
    records = tree.records

    def agree(i: int, j: int) -> bool:
        """Returns True for two leaves of one shape and dtype, and for two equal static values."""
        (left_op, _), (right_op, _) = records[i], records[j]
        if left_op is LEAF and right_op is LEAF:
            return kind_of(tree.leaves[i]) == kind_of(tree.leaves[j])
        return type(left_op) is Static and left_op == right_op

    # Yields the pairs of records at one path, and a `Mismatch` at the first path at which they do not agree.
    for pair in pairs(tree.below(left), tree.below(right), agree):
        if isinstance(pair, Mismatch):
            return pair.path
        # `pairs` compares classes and numbers of children only. Equal operations also have equal static data.
        if type(records[pair.left][0]) is Node and records[pair.left][0] != records[pair.right][0]:
            return pair.path
    return None


def _are_transposed(tree: FlatDag, left: int, right: int) -> bool:
    """Returns True if two records are matrices of the shapes (m, n) and (n, m), with m ≠ n, and of one dtype."""
    if tree.records[left][0] is not LEAF or tree.records[right][0] is not LEAF:
        return False
    left_leaf, right_leaf = tree.leaves[left], tree.leaves[right]
    # A kind is a shape and a dtype.
    left_kind, right_kind = kind_of(left_leaf), kind_of(right_leaf)
    if len(left_kind.shape) != 2 or not (carries_identity(left_leaf) and carries_identity(right_leaf)):
        return False
    return left_kind.dtype == right_kind.dtype and left_kind.shape == right_kind.shape[::-1] != right_kind.shape


def _path_of_parameter(tree: FlatDag, number: int, path: Path) -> str:
    """Returns the path from the root to an array, or to the variable of Flax NNX that holds the array.

    Args:
        tree: the tree.
        number: number of a record that holds the array, or is it.
        path: path from that record to the array.
    """
    holder = tree.records[_record_at(tree, number, path[:-1])][0]
    is_in_variable = path and type(holder) is Node and holder.type.convention == "variable"
    return tree.paths_of_edges[number][0] + jtu.keystr(path[:-1] if is_in_variable else path)


def _record_at(tree: FlatDag, number: int, path: Path) -> int:
    """Follows a path down from a record. Returns the number of the record at its end."""
    for key in path:
        op, children = tree.records[number]
        assert type(op) is Node
        number = children[op.keys.index(key)]
    return number


def _described(tree: FlatDag, number: int, counterpart: int) -> str:
    """Describes a record in words: an array by dtype and shape, and a node by its class and any different static data.

    Args:
        tree: the tree, with its leaves.
        number: number of the record.
        counterpart: number of the record to compare it with. Of two nodes of one class, the different static data are
            named.
    """
    op, counterpart_op = tree.records[number][0], tree.records[counterpart][0]
    if op is LEAF:
        return short_text(tree.leaves[number])
    if type(op) is Node:
        data = ""
        if type(counterpart_op) is Node and op.type.cls is counterpart_op.type.cls:
            data = f" with {static_data_text(op, counterpart_op)}"
        return f"of the class `{op.type.cls.__name__}`{data}"
    return f"the static value {shown(op.peek())}"  # pyright: ignore[reportAttributeAccessIssue]


def static_data_text(node: Node, counterpart: Node) -> str:
    """Prints the static data of a node that differ from those of another node of the same class.

    For a class with fields, the first fields that differ are printed as `name=value`. Else all data are printed.
    """
    data, counterpart_data = node.aux.peek(), counterpart.aux.peek()
    if node.type.fields:
        # The static data of such a class have pairs of a name and a value as the second entry.
        values, counterpart_values = dict(data[1]), dict(counterpart_data[1])
        common_names = [name for name in values if name in counterpart_values]
        differing = [name for name in common_names if Static(values[name]) != Static(counterpart_values[name])]
        if differing:
            del differing[_MAX_FIELDS:]
            texts = [f"{name}={distinguishing_text(values[name], counterpart_values[name])}" for name in differing]
            return ", ".join(texts)
    return f"the static data {distinguishing_text(data, counterpart_data)}"


def _interchangeable_parts(tree: FlatDag, left: int, right: int) -> list[tuple[int, int]]:
    """Finds pairs of arrays, one below each of two nodes, that could be one object.

    Returns:
        Numbers of the arrays below `left` and `right`: all pairs that fit and have one path below both nodes. If no
        such pair fits, the only pair of other arrays that fits. Empty if several other pairs fit, since nothing says
        which of them the user means.
    """
    # Path below the node → number of the array.
    left_arrays, right_arrays = (_arrays_below(tree, number) for number in (left, right))

    # Pairs at common paths.
    common_paths = left_arrays.keys() & right_arrays.keys()
    candidates = [(left_arrays[path], right_arrays[path]) for path in left_arrays if path in common_paths]
    matches = [pair for pair in candidates if pair[0] != pair[1] and _first_difference(tree, *pair) is None]
    if matches or len(left_arrays) * len(right_arrays) > _MAX_COMPARISONS:
        return matches

    # All other pairs.
    all_pairs = itertools.product(left_arrays.values(), right_arrays.values())
    matches = [pair for pair in all_pairs if pair[0] != pair[1] and _first_difference(tree, *pair) is None]
    return matches if len(matches) == 1 else []


def _arrays_below(tree: FlatDag, root: int) -> dict[Path, int]:
    """Maps paths below a record to the numbers of the arrays there. Each array is listed once, at its first path.

    A variable of Flax NNX is listed in place of the array in it, because that array carries no identity.
    """
    records = tree.records
    arrays: dict[Path, int] = {}
    visited: set[int] = {root}
    stack: list[tuple[int, Path]] = [(root, ())]
    while stack:
        number, path = stack.pop()
        op, children = records[number]
        # The root itself is no suggestion: it is one of the two nodes that cannot be tied.
        if path and (op is LEAF or (type(op) is Node and op.type.convention == "variable")):
            if op is not LEAF or carries_identity(tree.leaves[number]):
                arrays[path] = number
        elif type(op) is Node:
            steps = reversed(list(zip(op.keys, children, strict=True)))
            stack += [(child, (*path, key)) for key, child in steps if child not in visited]
            visited.update(children)
    return arrays
