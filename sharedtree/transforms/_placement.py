"""`device_put` and `with_sharding_constraint` on whole trees, with ties kept."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from .._context import pack_alone
from .._distinct import distinct
from .._graph import unpack
from .._node_types import require_registered
from .._packed import Packed
from .._structure import LEAF
from ._crossing import Argument, Names
from ._jit import is_sharding
from ._treatments import require_one_treatment

T = TypeVar("T")


def device_put(tree: T, device: Any = None, **options: Any) -> T:
    """`jax.device_put` on a whole tree; each shared array is moved once and stays shared.

    Args:
        tree: a module, or any container of modules and arrays.
        device: a device, a sharding, or a tree prefix of them.
        options: of `jax.device_put`.

    Returns:
        A tree of new nodes with the same ties; static leaves are those of `tree`.

    Raises:
        InconsistentSharingError: if a prefix sends one array to two places.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> moved = st.device_put({"a": w, "b": w}, jax.devices()[0])
        >>> moved["a"] is moved["b"], moved["a"].committed
        (True, True)
    """
    return _placed(tree, device, "device", lambda leaf, where: jax.device_put(leaf, where, **options))


def with_sharding_constraint(tree: T, shardings: Any) -> T:
    """`jax.lax.with_sharding_constraint` on a whole tree; each shared array is constrained once and stays shared.

    Args:
        tree: a module, or any container of modules and arrays.
        shardings: a sharding, or a tree prefix of them.

    Returns:
        A tree of new nodes with the same ties.

    Raises:
        InconsistentSharingError: if a prefix constrains one array in two ways.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, sharedtree as st
        >>> everywhere = jax.sharding.NamedSharding(
        ...     jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec()
        ... )
        >>> w = jnp.ones(2)
        >>> both = st.jit(lambda t: st.with_sharding_constraint(t, everywhere))([w, w])
    """
    return _placed(tree, shardings, "shardings", jax.lax.with_sharding_constraint)


def _placed(tree: T, prefix: Any, name: str, place: Callable[[Any, Any], Any]) -> T:
    require_registered(tree)
    leaves, structure = pack_alone(tree)
    argument = Argument("tree", (), Packed(leaves, structure))
    chosen = require_one_treatment(
        [(argument, prefix)],
        structure.records,
        Names(lambda tree: tree),
        transform=place.__name__ if place.__name__ != "<lambda>" else "device_put",
        fix="Give every path of the object the same place, or part them first: sharedtree.untie(tree).",
        is_label=is_sharding,
        name=name,
    )
    places = [chosen[number] for number, (op, _) in enumerate(structure.records) if op is LEAF]
    return unpack(structure, distinct([place(leaf, where) for leaf, where in zip(leaves, places, strict=True)]))
