"""In place, where a transform may not do the same to all that goes out: objects are written back by their places."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._pack_and_unpack import Rules
from ..core._prefix_trees import Branch
from ..core._structure import Given, Node, Op, Update
from ._function_side import FunctionTrace
from ._grouping_leaves import GroupedResult, group_result
from ._in_place import IN_PLACE, conventions, walked_together
from ._inconsistent_sharing import raise_inconsistent
from ._leaf_labels import Outcomes, Piece, Treatment, Visit


def group_result_with_state(
    result: Any, trace: FunctionTrace, treatment: Treatment, labels: Sequence[Any] | None, changes: Rules
) -> GroupedResult:
    """Groups the leaves of a result, and of what the function received and may have changed, by their labels.

    Args:
        result: what the function returned.
        trace: the trace of the function.
        treatment: what the transform will do with it. Its prefix is a `Branch` of two: for the arguments and the result.
        labels: labels of the groups. None for those that occur.
        changes: how what was received is walked.
    """
    received, arguments = trace.received.tree, trace.received.arguments
    prefix_of_arguments, prefix_of_result = treatment.prefix.parts
    entry = Outcomes(received, treatment._replace(prefix=prefix_of_arguments))
    entry_visits: dict[int, Visit] = {}
    for visit in entry.visits():
        entry_visits.setdefault(visit.record, visit)
    tree = trace.walked((arguments, result))
    trace.check_walked(tree, is_with_state=True)
    # Objects that the function took out of its arguments are walked beside them, so that the caller's are written to,
    # too. What holds others has a higher number, and brings the detached objects below it along.
    reachable = IdentitySet(tree.objects)
    conventions_of = conventions(received, changes)
    given, updated = changes.given or IdentityDict[int](), changes.updated or IdentityDict[int]()
    changeable = sorted(set(updated.values()), reverse=True)
    detached = [record for record in changeable if received.objects[record] not in reachable]
    tree = walked_together(
        [
            (arguments, changes.convention),
            *[(received.objects[record], conventions_of[record]) for record in detached],
            (result, changes.convention),
        ],
        trace.forbidding(changes._replace(given=None, updated=None)),
        [*[IN_PLACE] * (1 + len(detached)), ""],
    )
    prefixes = [
        prefix_of_arguments,
        *[entry.prefix_at(entry_visits[record]) for record in detached],
        prefix_of_result,
    ]
    num_state = 1 + len(detached)

    def op_of(outcomes: Outcomes) -> Callable[[Piece], Op | None]:
        state: set[Piece] = set()
        for root in outcomes.children(outcomes.root)[:num_state]:
            state.update(Piece(visit.record, outcomes[visit]) for visit in outcomes.reachable_from(root))
        _require_one_piece(outcomes, state, IdentitySet([*given, *updated]), trace.terms.title)
        first_visits = outcomes.first_visits()

        def replacement(piece: Piece) -> Op | None:
            obj = tree.objects[piece.record]
            record = updated.get(obj, given.get(obj))
            if piece not in state or record is None:
                return None
            # An object that goes out under another label than it came in with has to be packed, changed or not.
            is_moved = outcomes.descriptions_below(first_visits[piece]) != entry.descriptions_below(
                entry_visits[record]
            )
            if obj in given and not is_moved:
                return Given(record)
            op = tree.records[piece.record][0]
            return Update.of(record, op, received.records[record][0]) if type(op) is Node else None

        return replacement

    return group_result(tree, treatment._replace(prefix=Branch(tuple(prefixes))), labels, trace.terms.title, op_of)


def _require_one_piece(outcomes: Outcomes, state: Collection[Piece], callers: IdentitySet, title: str) -> None:
    """Raises an error if one of the caller's nodes would have to be written back in two ways."""
    seen: set[int] = set()
    for record, _ in sorted(state):
        is_node = outcomes.tree.node(record) is not None
        if is_node and outcomes.tree.objects[record] in callers and record in seen:
            raise_inconsistent(
                outcomes,
                record,
                title,
                "The function put it where it would be written back in two ways. It can put a copy of it, "
                "`sharedtree.copy(layer)`, into one of these places.\n",
            )
        seen.add(record)
