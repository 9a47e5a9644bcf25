"""Donation: which buffers a transform takes over, and a check that the caller does not mean to keep one of them.

This call would delete the buffers of `m`, although its second argument is not donated. That is an error:

    jit(f, donate_argnums=0)(m, m)
"""

from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import jax

from ..core._by_identity import IdentitySet
from ..core._call_arguments import Arguments, Position, positions_of
from ..core._jax_internals import current_traces
from ..core._prefix_trees import Branch
from ..core._sharing import copy_of_leaf
from ..core._structure import FlatDag, Record, edges
from ..nn._stateful_layers import makes_state
from ._caller_side import Call
from ._leaf_groups import LeafGroup
from ._leaf_labels import DONATED, KEPT, Outcomes, Treatment, find_occurrences, inconsistent_sharing_error, is_donated
from ._pass_through import is_tracer


def donation_treatment(arguments: Arguments, donated: Collection[Position]) -> Treatment | None:
    """Makes the treatment of donation: each argument is donated or kept. None if all are kept.

    Args:
        arguments: the arguments of a call.
        donated: positions and names of the donated ones.
    """
    if not donated:
        return None
    labels = [DONATED if position in donated else KEPT for position in positions_of(arguments.parts()[1])]
    return Treatment("donate_argnums", Branch(tuple(labels)), lambda label: isinstance(label, str))


def donated_records(tree: FlatDag, donation: Treatment) -> set[int]:
    """Finds the records below the donated arguments.

    Args:
        tree: the arguments of a call.
        donation: the treatment of donation.
    """
    donated: set[int] = set()
    for label, child in zip(donation.prefix.parts, tree.records[tree.root][1], strict=True):
        if label == DONATED:
            donated.update(tree.below(child).reached)
    return donated


def take_each_buffer_once(call: Call, donation: Treatment, transform: str) -> Call:
    """Checks the donated buffers of a call, and copies arrays that occur twice. Returns the call.

    Variables of NNX may hold one array without being tied. It is donated once, and copied for the other variables.
    Under an outer trace, or without compilation, JAX takes no buffer, so there is nothing to do.

    Args:
        call: the call. Its donated leaf groups may be changed.
        donation: the treatment of donation.
        transform: name of the transform, for errors.

    Raises:
        InconsistentSharingError: if a donated array is also in an argument that is not donated.
    """
    is_disabled = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    if is_disabled or len(current_traces()) > 1:
        return call
    donated_groups: list[LeafGroup] = []
    kept_groups: list[LeafGroup] = []
    for labels, group in zip(call.plan.labels, call.groups, strict=True):
        (donated_groups if is_donated(labels) else kept_groups).append(group)
    donated = [leaf for group in donated_groups for leaf in group.leaves if _has_buffer(leaf)]
    # The list keeps the arrays alive, so no other object has one of these ids.
    donated_ids = set(map(id, donated))
    for group in kept_groups:
        for leaf in group.leaves:
            if id(leaf) in donated_ids:
                _raise_donated_and_kept(leaf, call, donation, transform)
    if len(donated_ids) < len(donated):
        _copy_repeated_leaves(call, donated_groups)
    return call


def _copy_repeated_leaves(call: Call, donated_groups: Sequence[LeafGroup]) -> None:
    """Puts copies in the place of arrays in modules, wherever they occur a second time.

    Arrays outside modules stay as they are. If the user donates one of them twice, JAX raises its own error.
    """
    outside = call.tree.outside
    positions_outside = {position for position, record in enumerate(call.tree.leaf_numbers) if record in outside}
    positions_of_groups = [_positions(group) for group in donated_groups]
    # An array that is outside modules too is copied wherever it is inside one.
    taken = IdentitySet()
    for group, positions in zip(donated_groups, positions_of_groups, strict=True):
        for leaf, position in zip(group.leaves, positions, strict=True):
            if position in positions_outside:
                taken.add(leaf)
    for group, positions in zip(donated_groups, positions_of_groups, strict=True):
        leaves = list(group.leaves)
        for i, (leaf, position) in enumerate(zip(group.leaves, positions, strict=True)):
            if leaf in taken and _has_buffer(leaf) and position not in positions_outside:
                leaves[i] = copy_of_leaf(leaf)
            taken.add(leaf)
        group.leaves = leaves


def _positions(group: LeafGroup) -> Sequence[int]:
    """Positions of a group's leaves among all leaves of the arguments."""
    return range(len(group.leaves)) if group.selection.numbers is None else group.selection.numbers


def _raise_donated_and_kept(leaf: Any, call: Call, donation: Treatment, transform: str) -> NoReturn:
    """Raises the error for an array in a donated argument and in another one."""
    advice = "Its buffer would be given away, and whoever keeps the array would find it deleted.\n"
    tree = call.tree
    states = [((), record) for record, (op, _) in enumerate(tree.records) if makes_state(op)]
    if any(tree.objects[record] is leaf for record, _ in edges(tree.records, states)):
        advice += (
            "`equinox.nn.State(model)` begins with the arrays that the model keeps as its initial state. Here the "
            "model keeps none:\n"
            "    model, state = sharedtree.make_with_state(make_model)()\n"
        )
    # The array may have several records, one for each variable of NNX that holds it, or for each side of a cut. They
    # are merged into one here, so that the error names the paths of all.
    merged = next(record for record, obj in tree.leaves.items() if obj is leaf)

    def with_merged(record: Record) -> Record:
        op, children = record
        return op, tuple([merged if tree.objects[child] is leaf else child for child in children])

    records = [with_merged(record) for record in tree.records]
    outcomes = Outcomes(FlatDag(records, tree.root, tree.objects), donation)
    raise inconsistent_sharing_error(find_occurrences(outcomes, merged), transform, advice)


def _has_buffer(leaf: Any) -> bool:
    """Returns True if a leaf is an array with a buffer. A tracer has none."""
    return isinstance(leaf, jax.Array) and not is_tracer(leaf)
