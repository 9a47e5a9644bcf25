"""Donation: the buffers that a transform takes over, and a check that no other argument keeps one of them.

This call would delete the buffers of `m`, although its second argument is not donated. That is an error:

    jit(f, donate_argnums=0)(m, m)

The arguments of a call are one graph, a `FlatDag`. It has a numbered *record* for each object: the operation that
builds the object, and the records of its children. The children of the root are the arguments.

The *treatment* of an option gives each leaf a label. Here the labels are `DONATED` and `KEPT`. A transform gets *leaf
groups* in place of the arguments: leaves with the same labels are in one group. If an array is reached under two
labels, its tie is *cut*: it becomes two leaves, each with a record of its own.
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
    """Makes the treatment of donation: each argument is donated or kept. Returns None if `donated` is empty.

    Args:
        arguments: the arguments of a call.
        donated: indices of the donated positional arguments, and names of the donated keyword arguments.
    """
    if not donated:
        return None
    # `names` has one entry for each traced argument. Static arguments have no leaves, so they are left out.
    # `positions_of` turns an entry into the index of a positional argument, or into the name of a keyword argument.
    _, names = arguments.parts()
    labels = [DONATED if position in donated else KEPT for position in positions_of(names)]
    return Treatment("donate_argnums", Branch(tuple(labels)), is_label=lambda label: isinstance(label, str))


def donated_records(tree: FlatDag, donation: Treatment) -> set[int]:
    """Returns the records of the donated arguments and of everything in them.

    Args:
        tree: the arguments of a call.
        donation: the treatment of donation. It has one label for each argument.
    """
    donated: set[int] = set()
    _, arguments = tree.records[tree.root]
    for label, argument in zip(donation.prefix.parts, arguments, strict=True):
        if label == DONATED:
            donated.update(tree.below(argument).reached)
    return donated


def take_each_buffer_once(call: Call, donation: Treatment, transform: str) -> Call:
    """Makes sure that no donated buffer is kept by another argument, or donated twice. Returns the call.

    An array in two donated leaves is copied for the second one: two variables of Flax NNX may hold one array without
    being tied. Under an outer trace, or without compilation, JAX takes over no buffer, so nothing is done.

    Args:
        call: the call. Copies are put into its donated leaf groups.
        donation: the treatment of donation.
        transform: name of the transform, for errors.

    Raises:
        InconsistentSharingError: if a donated array is also in an argument that is not donated.
    """
    is_disabled = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    # More than one active trace: a transform around this one is tracing.
    if is_disabled or len(current_traces()) > 1:
        return call
    # Sort the groups into donated and kept ones.
    donated_groups: list[LeafGroup] = []
    kept_groups: list[LeafGroup] = []
    for labels, group in zip(call.plan.labels, call.groups, strict=True):
        (donated_groups if is_donated(labels) else kept_groups).append(group)
    # Look for donated arrays among the kept leaves. An array whose tie was cut is in both.
    donated = [leaf for group in donated_groups for leaf in group.leaves if _has_buffer(leaf)]
    # The list keeps the arrays alive, so no other object has one of these ids.
    donated_ids = set(map(id, donated))
    for group in kept_groups:
        for leaf in group.leaves:
            if id(leaf) in donated_ids:
                _raise_donated_and_kept(leaf, call, donation, transform)
    # Fewer ids than leaves: some array is in two donated leaves.
    if len(donated_ids) < len(donated):
        _copy_repeated_leaves(call, donated_groups)
    return call


def _copy_repeated_leaves(call: Call, donated_groups: Sequence[LeafGroup]) -> None:
    """Puts copies in the place of arrays that are in several donated leaves, so that each buffer is donated once.

    Only leaves in modules get copies. A leaf outside modules (some path leads to it through plain containers alone)
    keeps its array. If the user donates an array twice outside modules, JAX raises its own error.
    """
    # Record → number of its paths outside modules. Only its keys are used.
    outside = call.tree.outside
    positions_outside = {position for position, record in enumerate(call.tree.leaf_numbers) if record in outside}
    # For each group, where its leaves are among all leaves of the arguments.
    positions_of_groups = [_positions(group) for group in donated_groups]
    # An array that is outside modules and inside one counts as taken by the place outside, even if that comes later. So
    # the place inside gets the copy.
    taken = IdentitySet()
    for group, positions in zip(donated_groups, positions_of_groups, strict=True):
        for leaf, position in zip(group.leaves, positions, strict=True):
            if position in positions_outside:
                taken.add(leaf)
    # Inside modules, the first leaf with an array takes it, and every later one gets a copy.
    for group, positions in zip(donated_groups, positions_of_groups, strict=True):
        leaves = list(group.leaves)
        for i, (leaf, position) in enumerate(zip(group.leaves, positions, strict=True)):
            if leaf in taken and _has_buffer(leaf) and position not in positions_outside:
                # `copy_of_leaf` makes a copy with the same data.
                leaves[i] = copy_of_leaf(leaf)
            taken.add(leaf)
        group.leaves = leaves


def _positions(group: LeafGroup) -> Sequence[int]:
    """Returns the positions of a group's leaves among all leaves of the arguments."""
    # None stands for all leaves, in order.
    return range(len(group.leaves)) if group.selection.numbers is None else group.selection.numbers


def _raise_donated_and_kept(leaf: Any, call: Call, donation: Treatment, transform: str) -> NoReturn:
    """Raises the error for an array in a donated argument and in a kept one. The error names its paths in both.

    Args:
        leaf: the array.
        call: the call.
        donation: the treatment of donation.
        transform: name of the transform.
    """
    advice = "Donation deletes the array, which the other paths still refer to.\n"
    tree = call.tree
    # Is the array in an `equinox.nn.State`? Then the cause is known, and the fix is another one.
    states = [((), record) for record, (op, _) in enumerate(tree.records) if makes_state(op)]
    # `edges` yields each record below a state, with its path.
    if any(tree.objects[record] is leaf for record, _ in edges(tree.records, states)):
        advice = (
            "Donation deletes the array. `equinox.nn.State(model)` begins with arrays that the model keeps as its "
            "initial state. Make a model that keeps none:\n"
            "    model, state = sharedtree.make_with_state(make_model)()\n"
        )
    # The array may have several records: one for each variable of Flax NNX that holds it, or one for each label under
    # which it is reached. Here all parents get the first of these records as their child, so that the error names the
    # paths of all.
    first_record = next(record for record, obj in tree.leaves.items() if obj is leaf)

    def with_one_record_of_leaf(record: Record) -> Record:
        op, children = record
        return op, tuple([first_record if tree.objects[child] is leaf else child for child in children])

    records = [with_one_record_of_leaf(record) for record in tree.records]
    outcomes = Outcomes(FlatDag(records, tree.root, tree.objects), donation)
    raise inconsistent_sharing_error(find_occurrences(outcomes, first_record), donation, transform, advice)


def _has_buffer(leaf: Any) -> bool:
    """Returns True if a leaf is an array with a buffer. A tracer has none."""
    return isinstance(leaf, jax.Array) and not is_tracer(leaf)
