"""`unwrap_shared`: turns models that use `equinox.nn.Shared` into models with ties.

`Shared(pytree, where, get)` keeps `pytree` with a placeholder at each node that `where` returns. A call of the wrapper
puts there the nodes that `get` returns, from elsewhere in `pytree`. In this file these are the *targets* and their
*sources*:

    Shared((embed, head), where=lambda p: p[1].weight, get=lambda p: p[0].weight)
                          target: [1].weight           source: [0].weight

Both functions choose nodes and look at no values, so they are called on a stand-in for the tree (`WhereTree`), which
finds out the records of the nodes that they return. Then the source is put in the place of the target. It has two paths
now, which is a tie.

A *record* is an object of the tree, by its number: its operation (node type, leaf or static value) and the
numbers of its children.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx

from ..core._errors import CycleError, SharingMismatchError
from ..core._node_types import require_registered
from ..core._printing import shown
from ..core._structure import FlatDag, Op
from ..ties._policy_and_context import walk_exactly
from ..ties._where_functions import WhereTree
from ..tree._partition import rebuilt


def unwrap_shared(tree: Any) -> Any:
    """Replaces each `equinox.nn.Shared` by the result of a call of it, a pytree with real ties.

    Nodes tied by the wrapper are one object in the result, and stay one under the transforms of this library. In the
    code of the model, replace `self.shared()` by `self.shared`.

    Args:
        tree: a `Shared`, or a model that holds some at any depth; it is not changed.

    Returns:
        A tree of new nodes with the same array objects as `tree`. For a `Shared` itself, its pytree.
        Ties of `tree` are kept.

    Raises:
        TypeError: if there is no `Shared` in the tree, or if one has lost its functions, as in a gradient.
        SharingMismatchError: if `get` returns a computed array, for example a transpose: no tie can express it.
        CycleError: if `get` returns a node that is itself replaced, so that the replacements form a circle, or if an
            object contains itself.

    Cost: two walks over the nodes. Nothing is copied.

    Example:
        >>> import equinox as eqx, jax, sharedtree as st
        >>> keys = jax.random.split(jax.random.key(0))
        >>> pair = (eqx.nn.Embedding(5, 3, key=keys[0]), eqx.nn.Linear(3, 5, key=keys[1]))
        >>> shared = eqx.nn.Shared(pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight)
        >>> embed, head = st.unwrap_shared(shared)
        >>> embed.weight is head.weight
        True
        >>> model = st.unwrap_shared({"layers": shared, "scale": 2.0})
        >>> [tie.paths for tie in st.ties(model)]
        [("['layers'][0].weight", "['layers'][1].weight")]

    Limitations: `where` and `get` are also called on stand-ins without values. So they cannot call a `Shared` inside
    the pytree of another one; its nodes are at `.pytree`. Instances of subclasses of `Shared` stay as they are.
    """
    require_registered(tree)
    dag = walk_exactly(tree)
    records = dag.records
    wrappers = _wrappers(dag)
    if not wrappers:
        raise TypeError(
            f"`unwrap_shared` found no `equinox.nn.Shared` in {shown(tree)}. If it has two objects that should be "
            "one, tie them:\n"
            "    model = sharedtree.tie(model, lambda m: (m.embed.weight, m.head.weight))"
        )
    where_tree = WhereTree(dag)
    # Record of a wrapper → its pytree; target → source. The result has the second in the place of the first.
    replacements: dict[int, int] = {}
    for number, path in wrappers.items():
        # The children of a `Shared` are its pytree, `where` and `get`.
        pytree, *functions = records[number][1]
        where, get = [dag.objects[function] for function in functions]
        if not callable(where) or not callable(get):
            raise _filtered_error(path)
        # `named_by` returns the records of the nodes, and True if the function returned one node and no sequence.
        targets, is_one_target = where_tree.named_by(where, root=pytree)
        sources, is_one_source = _sources(get, where_tree, pytree, path)
        # `get` returned one node of the pytree that is itself a sequence of the sources.
        if is_one_source and not is_one_target:
            sources = records[sources[0]][1]
        if len(sources) != len(targets):
            raise _uneven_error(path, len(targets), len(sources))
        replacements.update(zip(targets, sources, strict=True))
        replacements[number] = pytree

    def expand(number: int) -> tuple[Op, Sequence[int]]:
        """Returns the operation of a record, and its children in the result."""
        op, children = records[number]
        return op, [_resolve(child, replacements) for child in children]

    if _has_cycle(dag, replacements):
        raise _circular_error([*wrappers.values()])
    return rebuilt(_resolve(dag.root, replacements), expand, dag.objects.__getitem__)


def _wrappers(tree: FlatDag) -> dict[int, str]:
    """Finds the record of each `Shared`, with its first path."""
    wrappers: dict[int, str] = {}
    for number in tree.first_paths:
        node = tree.node(number)
        if node is not None and node.type.cls is eqx.nn.Shared:
            wrappers[number] = tree.text(number)
    return wrappers


def _sources(get: Callable[[Any], Any], where_tree: WhereTree, pytree: int, path: str) -> tuple[Sequence[int], bool]:
    """Calls `get`.

    Args:
        get: the function.
        where_tree: stand-in for the whole tree, to call the function.
        pytree: record of the pytree of the wrapper.
        path: path of the wrapper, for the error.

    Returns:
        The records of the nodes that `get` returns, and True if it returned one node and no sequence of nodes.

    Raises:
        SharingMismatchError: if `get` returns something that is no node of the pytree.
    """
    # The error of `named_by` has no advice for a `Shared`.
    try:
        return where_tree.named_by(get, "get", root=pytree)
    except SharingMismatchError as error:
        # The first sentence of the error, which says what `get` returned.
        fact, _, _ = str(error).partition(".\n")
        raise SharingMismatchError(
            f"`unwrap_shared` cannot unwrap the `equinox.nn.Shared`{_at(path)}: its {fact}.\n"
            "A computed array, such as a transpose, is a new array, not the shared one. You can keep the wrapper, "
            "which every transform of `sharedtree` can take. Or tie the two arrays through the function:\n"
            "    model = sharedtree.tie(model, lambda m: (m.embed.weight, m.head.weight), through=jnp.transpose)\n"
            "Or let both layers hold one array, and compute where it is used:\n"
            "    logits = x @ model.embed.weight.T",
            (path,),
        ) from None


def _resolve(number: int, replacements: dict[int, int]) -> int:
    """Follows the replacements from a record to the record in its place in the result."""
    end = number
    while end in replacements:
        end = replacements[end]
    # Point each record on the way to the end, so that no chain is followed twice.
    while number != end:
        replacements[number], number = end, replacements[number]
    return end


def _has_cycle(tree: FlatDag, replacements: dict[int, int]) -> bool:
    """Returns True if a record holds itself after the replacements, or if replacements form a circle.

    Args:
        tree: the tree before the replacements.
        replacements: record → the record in its place.
    """
    # Visited record → True while the records below it are being visited. If it is reached again then, it is in a cycle.
    is_open: dict[int, bool] = {}
    # Pairs of a record and True if all records below it were visited. A record is pushed again, with True, before its
    # children, so that it comes off the stack after them.
    stack = [(tree.root, False)]
    while stack:
        number, is_done = stack.pop()
        if is_done:
            is_open[number] = False
        elif number in is_open:
            if is_open[number]:
                return True
        else:
            is_open[number] = True
            stack.append((number, True))
            children = [replacements[number]] if number in replacements else tree.records[number][1]
            stack.extend((child, False) for child in children)
    return False


def _uneven_error(path: str, num_targets: int, num_sources: int) -> SharingMismatchError:
    """Returns the error for a wrapper with different numbers of targets and sources."""
    return SharingMismatchError(
        f"The `where` of the `equinox.nn.Shared`{_at(path)} returns {num_targets} of its nodes, and its `get` "
        f"{num_sources}. Let both return the same number.",
        (path,),
    )


def _filtered_error(path: str) -> TypeError:
    """Returns the error for a wrapper without its functions."""
    return TypeError(
        f"The `equinox.nn.Shared`{_at(path)} has lost its functions, because it comes from a gradient, from the state "
        "of an optimizer or from one part of a partition. Combine it with the rest of the model first:\n"
        "    tree = equinox.combine(tree, equinox.filter(model, equinox.is_array, inverse=True))"
    )


def _circular_error(paths: Sequence[str]) -> CycleError:
    """Returns the error for a circle of replacements. It names all wrappers, because any may be at fault."""
    names = ", ".join(f"`{path}`" if path else "the whole tree" for path in paths)
    return CycleError(
        "An `equinox.nn.Shared` refers to itself: its `get` returns a node that its `where` removes, or that contains "
        f"such a node. The wrappers in question are {names}. Let `get` return a node that stays.",
        paths,
    )


def _at(path: str) -> str:
    """Returns words for a path, to follow a noun; nothing for the root."""
    return f" at `{path}`" if path else ""
