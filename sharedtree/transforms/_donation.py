"""Donation: whose buffers a transform takes, and that none of them is one that its owner means to keep."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import jax

from ..core._by_identity import IdentitySet
from ..core._call_arguments import Arguments, Position, positions_of
from ..core._distinct_leaves import another
from ..core._flat_dags import FlatDag
from ..core._jax_internals import current_traces
from ..core._prefix_trees import Branch
from ..core._structure import edges
from ..nn._stateful_layers import makes_state
from ._caller_side import Call
from ._function_side import Received
from ._function_transform import FunctionTransform
from ._inconsistent_sharing import find_occurrences, inconsistent_sharing_error
from ._leaf_groups import LeafGroup
from ._leaf_labels import DONATED, KEPT, Outcomes, Treatment, is_donated
from ._pass_through import is_tracer


class DonatingTransform(FunctionTransform):
    """A function under a transform that may take the buffers of its arguments."""

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """The arguments whose buffers are taken."""
        return ()

    def donating(self, arguments: Arguments) -> Treatment | None:
        """Donated or not; None if nothing is donated."""
        donated = self.donated_positions(len(arguments.args), arguments.kwargs)
        if not donated:
            return None
        names = arguments.parts()[1]
        each = [DONATED if position in donated else KEPT for position in positions_of(names)]
        return Treatment("donate_argnums", Branch(tuple(each)), lambda label: isinstance(label, str))

    def is_taken(self, received: Received) -> Callable[[int], bool]:
        """Donated buffers are."""
        donating = self.donating(received.arguments)
        if donating is None:
            return super().is_taken(received)
        tree = received.tree
        taken: set[int] = set()
        for label, child in zip(donating.prefix.parts, tree.records[tree.root][1], strict=True):
            if label == DONATED:
                taken.update(tree.below(child).reached)
        return taken.__contains__

    def executable(self, call: Call) -> Call:
        """As it is, or with a copy of an array that several donated variables of NNX hold.

        Raises:
            InconsistentSharingError: if an array would be given away that is also in an argument which is not donated.
        """
        donating = self.donating(call.arguments)
        return call if donating is None else given_away_once(call, donating, self.transform_name)


def given_away_once(call: Call, donating: Treatment, transform: str) -> Call:
    """A call that takes each buffer once.

    An array in several variables of NNX is several values, so all but one of them are copies. Under an outer trace, or
    without compilation, no buffer is taken.

    Raises:
        InconsistentSharingError: if executing the call would take the buffer of an array that is also in an argument
            which is not donated.
    """
    disabled = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    if disabled or len(current_traces()) > 1:
        return call
    groups = list(zip(call.plan.labels, call.groups, strict=True))
    given = [leaf for label, group in groups if is_donated(label) for leaf in group.leaves if _has_buffer(leaf)]
    kept = [leaf for label, group in groups if not is_donated(label) for leaf in group.leaves]
    taken = set(map(id, given))  # alive in `given`
    leaf = next((leaf for leaf in kept if id(leaf) in taken), None)  # as above
    if leaf is not None:
        _raise_given_away(leaf, call, donating, transform)
    if len(taken) < len(given):
        _with_own_buffers(call, [group for label, group in groups if is_donated(label)])
    return call


def _with_own_buffers(call: Call, donated: Sequence[LeafGroup]) -> None:
    """Puts copies in the places of an array in modules that was met before. Bare ones are the caller's affair."""
    outside = call.tree.outside
    places = {place for place, number in enumerate(call.tree.leaf_numbers) if number in outside}
    in_order = [
        range(len(group.leaves)) if group.selection.numbers is None else group.selection.numbers for group in donated
    ]
    both = [
        (leaf, at)
        for group, own in zip(donated, in_order, strict=True)
        for leaf, at in zip(group.leaves, own, strict=True)
    ]
    taken = IdentitySet(leaf for leaf, at in both if at in places)
    for group, numbers in zip(donated, in_order, strict=True):
        leaves = list(group.leaves)
        for i, (leaf, place) in enumerate(zip(group.leaves, numbers, strict=True)):
            if leaf in taken and _has_buffer(leaf) and place not in places:
                leaves[i] = another(leaf)
            taken.add(leaf)
        group.leaves = leaves


def _raise_given_away(leaf: Any, call: Call, donating: Treatment, transform: str) -> NoReturn:
    advice = "Its buffer would be given away, and whoever keeps the array would find it deleted.\n"
    tree = call.tree
    states = [((), number) for number, (op, _) in enumerate(tree.records) if makes_state(op)]
    if any(tree.objects[number] is leaf for number, _ in edges(tree.records, states)):
        advice += (
            "`equinox.nn.State(model)` begins with the arrays that the model keeps as its initial state. Here the "
            "model keeps none:\n"
            "    model, state = sharedtree.make_with_state(make_model)()\n"
        )
    # All places of the array as one leaf, whichever records they are.
    number = next(n for n, obj in tree.leaves.items() if obj is leaf)
    one = [
        (op, tuple([number if tree.objects[child] is leaf else child for child in children]))
        for op, children in tree.records
    ]
    outcomes = Outcomes(FlatDag(one, tree.root, tree.objects), donating)
    raise inconsistent_sharing_error(find_occurrences(outcomes, number), transform, advice)


def _has_buffer(leaf: Any) -> bool:
    """Whether a leaf is an array with a buffer that could be given away."""
    return isinstance(leaf, jax.Array) and not is_tracer(leaf)
