"""`jax.tree_map` as treeo gets it: what is one object in a tree is mapped once, so sharing survives.

treeo copies, filters, merges and initialises its trees with `jax.tree_map`, which would visit a shared module once for
each path and make as many. Here a node that carries identity, and an array below one, is visited once with the same
companions:

    map(f, Model(a=layer, b=layer))         f sees layer.w once, and the result's a and b are one object
    map(f, Model(a, a), Model(b, c))        a meets b and c, so the result has two

All else is JAX's: what counts as a leaf, the order of the calls, and the errors for trees that do not match.
"""

from collections.abc import Callable
from typing import Any

import jax

from .._node_types import carries_identity, node_type_of


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """`jax.tree.map`, with the sharing of `tree` in the result.

    Args:
        f: takes a leaf and what is at its path in each of `rest`. For an array that is met again below a module, with
            the same companions, it is not called again.
        tree: any pytree.
        rest: trees of its shape.
        is_leaf: nodes for which it is true are leaves.

    Returns:
        A tree of new nodes.

    Cost: one call of `jax.tree.map` for each node that carries identity.
    """
    # The key of what was visited: the ids of objects that the value keeps alive.
    made: dict[tuple[int, ...], tuple[Any, tuple[Any, ...]]] = {}

    def once(visit: Callable[..., Any], objects: tuple[Any, ...]) -> Any:
        key = tuple([id(obj) for obj in objects])
        if key not in made:
            made[key] = visit(*objects), objects
        return made[key][0]

    def below(top: Any, *others: Any) -> Any:
        """The map of one node that carries identity, up to the next."""

        def stops(x: Any) -> bool:
            return x is not top and (_is_shared_node(x) or (is_leaf is not None and is_leaf(x)))

        def visit(*objects: Any) -> Any:
            x = objects[0]
            if is_leaf is not None and is_leaf(x):
                return f(*objects)
            if _is_shared_node(x):
                return once(below, objects)
            return once(f, objects) if carries_identity(x) else f(*objects)

        return jax.tree.map(visit, top, *others, is_leaf=stops)

    def outside(*objects: Any) -> Any:
        x = objects[0]
        return once(below, objects) if _is_module(x) and not (is_leaf is not None and is_leaf(x)) else f(*objects)

    def stops_outside(x: Any) -> bool:
        return _is_module(x) or (is_leaf is not None and is_leaf(x))

    return jax.tree.map(outside, tree, *rest, is_leaf=stops_outside)


def _is_shared_node(x: Any) -> bool:
    node_type = node_type_of(x)
    return node_type is not None and node_type.carries_identity


def _is_module(x: Any) -> bool:
    node_type = node_type_of(x)
    return node_type is not None and not node_type.is_plain
