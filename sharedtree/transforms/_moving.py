"""In place: what a function moved to where it would be written back in another way than it came in.

vmap(f, in_axes=(0, 1), in_place=True)        m.x, n.x = n.x, m.x            arrays: each has the axis of its place
                                              m.layer = n.layer              an error: along which axis?
"""

from collections.abc import Mapping

from .._errors import InconsistentSharingError
from .._structure import LEAF
from ._treatments import Fates, Way, are_one


def moved_arrays(
    after: Fates, num_state: int, before: Fates, known: Mapping[int, int], transform: str
) -> set[tuple[int, int]]:
    """The arrays of the state that leave where they are treated in another way than they came in: record and fate.

    Args:
        after: of the state and the result.
        num_state: how many of their modules are the state.
        before: of what came in.
        known: objects that came in: id → number.
        transform: what it is called, for errors.

    Raises:
        InconsistentSharingError: if it is an object that holds traced leaves.
    """
    ways_of: dict[int, list[Way]] = {}
    for way in {way for root in before.ways for way in before.ways_from(root)}:
        ways_of.setdefault(way[0], []).append(way)
    objects, records = after.graph.objects, after.graph.records
    moved: set[tuple[int, int]] = set()
    for root in after.ways[:num_state]:
        for way in after.ways_from(root):
            number = known.get(id(objects[way[0]]))  # alive in the tags
            if number is None:
                continue
            came = [treatment for one in ways_of[number] for treatment in before.treatments_of(one)]
            goes = after.treatments_of(way)
            if not came or all(any(are_one(one, other) for other in came) for one in goes):
                continue
            if records[way[0]][0] is LEAF:
                moved.add((way[0], after[way]))
                continue
            (one, two), obj = (before.path_to(ways_of[number][0]), after.path_to(way)), objects[way[0]]
            words = [" and ".join(map(after.treatment.describe, each)) for each in (came, goes)]
            raise InconsistentSharingError(
                f"In place, `{transform}` would write a `{type(obj).__name__}` in another way than it read it.\n"
                f"    `{one}`: came in there, and so goes out with {words[0]}\n"
                f"    `{two}`: where the function put it, it would go out with {words[1]}\n"
                "The function can put a copy of it, `sharedtree.copy(layer)`, there.",
                (one, two),
                words,
            )
    return moved
