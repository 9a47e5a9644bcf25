"""`device_put`, `with_sharding_constraint` and `equinox.filter_shard` on whole trees, with ties kept.

Each leaf is placed once. Then the tree is built anew, with the leaves in their new places:

    device_put({"a": w, "b": w}, device)        w is moved to v        {"a": v, "b": v}

The *prefix* says where each leaf goes: one placement for the whole tree, or a tree of placements with the upper part of
the tree's shape. A *placement* here is any object that JAX takes, such as a device or a sharding.
"""

from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import equinox as eqx
import jax

from ..core._call_arguments import Arguments
from ..core._jax_internals import api_boundary
from ..core._pack_and_unpack import unpack
from ..core._prefix_trees import Branch
from ..core._sharing import with_repeats_copied
from ..ties._leaf_notes import hand_on
from ..ties._list_ties import read_tree
from ..ties._policy_and_context import Context
from ._calls_with_operands import CallWithOperands, TakingOperands
from ._leaf_labels import Outcomes, raise_inconsistent
from ._option_lists import lists_options_of
from ._placements import placement_treatment
from ._signatures import Placing

T = TypeVar("T")


@lists_options_of(jax.device_put)
@api_boundary
def device_put(tree: T, device: Any = None, **options: Unpack[Placing]) -> T:
    """Moves the arrays of a whole tree with `jax.device_put`. Each shared array is moved once and stays shared.

    Args:
        tree: a module, or any container of modules and arrays.
        device: a device, a sharding, or a prefix tree of devices and shardings.
        options: further options of `jax.device_put`.

    Returns:
        A tree of new modules and containers with the same ties. Its static leaves are those of `tree`.

    Raises:
        InconsistentSharingError: if a prefix sends one array to two places.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> moved = st.device_put({"a": w, "b": w}, jax.devices()[0])
        >>> moved["a"] is moved["b"], moved["a"].committed
        (True, True)
    """

    def place_leaf(leaf: Any, placement: Any) -> Any:
        return jax.device_put(leaf, placement, **options)

    return _place_leaves(tree, device, place_leaf, option="device", transform="device_put")


@api_boundary
def with_sharding_constraint(tree: T, shardings: Any) -> T:
    """Constrains the arrays of a whole tree with `jax.lax.with_sharding_constraint`. Each shared array stays shared.

    Args:
        tree: a module, or any container of modules and arrays.
        shardings: a sharding, or a prefix tree of shardings.

    Returns:
        A tree of new modules and containers with the same ties. Its static leaves are those of `tree`.

    Raises:
        InconsistentSharingError: if a prefix constrains one array in two ways.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, sharedtree as st
        >>> everywhere = jax.sharding.NamedSharding(
        ...     jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec()
        ... )
        >>> w = jnp.ones(2)
        >>> constrain = lambda dag: st.with_sharding_constraint(dag, everywhere)
        >>> constrained = st.jit(constrain)(st.Dag([w, w])).tree
        >>> constrained[0] is constrained[1]
        True
    """
    constrain = jax.lax.with_sharding_constraint
    return _place_leaves(tree, shardings, constrain, option="shardings", transform="with_sharding_constraint")


def filter_shard(call: CallWithOperands, x: Any, device_or_shardings: Any) -> Any:
    """Adapter of `equinox.filter_shard`: what `preserve_identities(equinox.filter_shard)` does.

    Places each shared array once, and returns the new tree. Like `device_put`, it takes its whole argument as one
    model, so ties in plain containers count, too.

    Args:
        call: the call of the transform. Only its policy and its title are used.
        x: the tree. This parameter and the next have the names of Equinox's parameters.
        device_or_shardings: a device, a sharding, or a prefix tree of devices and shardings.
    """
    # The tree is read under the policy of the innermost `Context`.
    with Context(call.policy):
        return _place_leaves(
            x, device_or_shardings, eqx.filter_shard, option="device_or_shardings", transform=call.title
        )


def _place_leaves(tree: T, prefix: Any, place_leaf: Callable[[Any, Any], Any], *, option: str, transform: str) -> T:
    """Places each leaf of a tree once, and builds the tree anew. Returns the new tree.

    Args:
        tree: a module, or any container of modules and arrays.
        prefix: a placement, or a prefix tree of placements.
        place_leaf: (leaf, placement) → the leaf in this place.
        option: name of the option with the prefix, for errors.
        transform: name of the transform, for errors.

    Raises:
        InconsistentSharingError: if the prefix has two placements for one array, or for one module.
    """
    # The whole tree is read as one model, so a tie in a plain container counts, too. The tree becomes the only child of
    # a new root, whose name begins the paths in errors. A `Branch` of one prefix fits this root.
    dag = read_tree(Arguments(("tree",), (tree,), {}))
    outcomes = Outcomes(dag, placement_treatment(option, Branch((prefix,))))
    # A *record* is the number of an object in `dag`. `conflicts` has the records of leaves and nodes with two
    # placements. `raise_inconsistent` always raises, so the loop ends with the first of them, if there is one.
    for record in sorted(outcomes.conflicts()):
        raise_inconsistent(outcomes, record, transform)
    # A *visit* is a record and the part of the prefix under which it is reached. A leaf may have several visits. There
    # is no conflict, so the labels of all of them mean one place, and any of these labels will do.
    leaf_visits = [visit for visit in outcomes.visits() if visit.record in dag.leaves]
    placement_of = {visit.record: outcomes.group_label(visit) for visit in leaf_visits}
    # `place_leaf` may return one array for two leaves that are not tied. `with_repeats_copied` copies it, so that they
    # stay two objects.
    leaves = with_repeats_copied([place_leaf(leaf, placement_of[record]) for record, leaf in dag.leaves.items()])
    # What is known of the old leaves, such as that their tie was undone on purpose, holds for the new ones.
    hand_on(list(dag.leaves.values()), leaves)
    return unpack(dag.structure, leaves).args[0]


FILTER_SHARD = TakingOperands(filter_shard)
"""The entry of `equinox.filter_shard` in the table of adapters: a transform that takes operands and no function."""
