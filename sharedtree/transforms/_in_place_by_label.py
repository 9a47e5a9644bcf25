"""In place, where a transform may not do the same to all that goes out: objects are written back by their places."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._pack_and_unpack import Rules
from ..core._prefix_trees import Branch
from ..core._structure import Given, Node, Op, Update
from ._dealing_into_hands import DealtOut, Name, dealt_out
from ._function_side import Inside
from ._in_place import IN_PLACE, conventions, walked_together
from ._inconsistent_sharing import raise_inconsistent
from ._leaf_labels import Fates, Treatment


def dealt_with_state(
    result: Any, inside: Inside, leaving: Treatment, labels: Sequence[Any] | None, changes: Rules
) -> DealtOut:
    """What was received and may have been changed, and the result; each dealt by the label of its place.

    Args:
        result: what the function returned.
        inside: the trace.
        leaving: what the transform will do to it; its prefix is a `Branch`, of one for the arguments and one for it.
        labels: of the hands; None for those that occur.
        changes: how what was received is walked.
    """
    received, arguments = inside.received.tree, inside.received.arguments
    of_arguments, of_result = leaving.prefix.parts
    came = Fates(received, leaving._replace(prefix=of_arguments))
    ways = {way[0]: way for way in reversed(list(came.ways()))}
    tree = inside.walked((arguments, result))
    inside.check_walked(tree, is_with_state=True)
    there = IdentitySet(tree.objects)
    around = conventions(received, changes)
    given, updated = changes.given or IdentityDict[int](), changes.updated or IdentityDict[int]()
    own = set(updated.values())
    # What holds others comes after them; and what is in something else that was detached comes with that.
    detached = [n for n in sorted(own, reverse=True) if received.objects[n] not in there]
    tree = walked_together(
        [
            (arguments, changes.convention),
            *[(received.objects[n], around[n]) for n in detached],
            (result, changes.convention),
        ],
        inside.forbidding(changes._replace(given=None, updated=None)),
        [*[IN_PLACE] * (1 + len(detached)), ""],
    )
    parts = [of_arguments, *[came.part_at(ways[n]) for n in detached], of_result]
    num_state = 1 + len(detached)

    def op_of(fates: Fates) -> Callable[[Name], Op | None]:
        state = {(way[0], fates[way]) for root in fates.below(fates.root)[:num_state] for way in fates.ways_from(root)}
        _require_one_way(fates, state, IdentitySet([*given, *updated]), inside.terms.title)
        way_of = fates.way_of_each()

        def instead(name: Name) -> Op | None:
            obj = tree.objects[name[0]]
            number = updated.get(obj, given.get(obj))
            if name not in state or number is None:
                return None
            op = tree.records[name[0]][0]
            is_moved = fates.all_described(way_of[name]) != came.all_described(ways[number])
            if obj in given and not is_moved:
                return Given(number)
            return Update.of(number, op, received.records[number][0]) if type(op) is Node else None

        return instead

    return dealt_out(tree, leaving._replace(prefix=Branch(tuple(parts))), labels, inside.terms.title, op_of)


def _require_one_way(fates: Fates, state: Collection[Name], own: IdentitySet, title: str) -> None:
    """Raises if one object is to be written to in two ways."""
    seen: set[int] = set()
    for number, _ in sorted(state):
        is_node = fates.tree.node(number) is not None
        if is_node and fates.tree.objects[number] in own and number in seen:
            raise_inconsistent(
                fates,
                number,
                title,
                "The function put it where it would be written back in two ways. It can put a copy of it, "
                "`sharedtree.copy(layer)`, into one of these places.\n",
            )
        seen.add(number)
