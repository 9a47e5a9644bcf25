"""`device_put` and `with_sharding_constraint` on whole trees, with ties kept."""

from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import equinox as eqx
import jax

from ..core._call_arguments import Arguments
from ..core._distinct_leaves import distinct
from ..core._jax_internals import api_boundary
from ..core._pack_and_unpack import unpack
from ..core._prefix_trees import Branch
from ..ties._leaf_notes import hand_on
from ..ties._list_ties import read_tree
from ..ties._policy_and_context import Context
from ._crossing import Crossing, TakingOperands
from ._inconsistent_sharing import raise_inconsistent
from ._leaf_labels import Outcomes
from ._option_lists import lists_options_of
from ._placements import placing
from ._signatures import Placing

T = TypeVar("T")


@lists_options_of(jax.device_put)
@api_boundary
def device_put(tree: T, device: Any = None, **options: Unpack[Placing]) -> T:
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
    return placed(tree, device, "device", "device_put", lambda leaf, where: jax.device_put(leaf, where, **options))


@api_boundary
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
    return placed(tree, shardings, "shardings", "with_sharding_constraint", jax.lax.with_sharding_constraint)


def placed(tree: T, prefix: Any, name: str, transform: str, place: Callable[[Any, Any], Any]) -> T:
    """A whole tree with each of its leaves placed once.

    Args:
        tree: a module, or any container of modules and arrays.
        prefix: a place, or a tree prefix of places.
        name: what the prefix is called, for errors.
        transform: who places, for errors.
        place: (leaf, its place) → the leaf there.
    """
    read = read_tree(Arguments(("tree",), (tree,), {}))
    outcomes = Outcomes(read, placing(name, Branch((prefix,))))
    for number in sorted(outcomes.conflicts()):
        raise_inconsistent(outcomes, number, transform)
    chosen = {visit.record: outcomes.group_label(visit) for visit in outcomes.visits() if visit.record in read.leaves}
    placed = distinct([place(leaf, chosen[number]) for number, leaf in read.leaves.items()])
    hand_on(list(read.leaves.values()), placed)
    return unpack(read.structure, placed).args[0]


def filter_shard(crossing: Crossing, x: Any, device_or_shardings: Any) -> Any:
    """`equinox.filter_shard`. Like `device_put`, it takes its whole argument as one model."""
    with Context(crossing.policy):
        return placed(x, device_or_shardings, "device_or_shardings", crossing.title, eqx.filter_shard)


FILTER_SHARD = TakingOperands(filter_shard)
