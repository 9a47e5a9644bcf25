"""The meet of the results of branches: what all of them can be packed like.

Ties of modules, classes and static values must be the same in all (`_joining`). Of the ties of arrays and mutable
containers those hold that all have, and a static number that is not the same in all is a traced leaf. What was noted of
a leaf in one branch is noted of it.

    one               another           meet
    State(z, z)       State(a, b)       State(·, ·)
    Net(w, steps=0)   Net(w, steps=1)   Net(·, ·)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .._packed import Packed
from .._structure import intern
from ._crossed import Graph, packed_in, with_each, with_packed
from ._joining import Words, joined, leaves_like, packed_as, require_same_containers
from ._lowering import lowered, lowering


def meet_of(trees: Mapping[str, Any], transform: str) -> Any:
    """What packed results of branches can all be packed like, with leaves that stand for nothing.

    Args:
        trees: by what the branches are called.
        transform: what joins them.

    Returns:
        A packed tree; None if they differ outside modules, and the transform itself says it best.

    Raises:
        SharingMismatchError: if they cannot.
    """
    (first, meet), *others = trees.items()
    for branch, tree in others:
        words = Words(transform, f"in the result of `{first}`", f"in the result of `{branch}`", are_peers=True)
        if not require_same_containers(meet, tree, "result", words):
            return None
        before, after = Graph.of(meet, "result"), Graph.of(tree, "result")
        found = joined(before, after, words)
        if not found.fits:
            before.objects = [0] * len(before.records)
            meet = with_each(meet, lowered(before, lowering(before, before, after, found))[0])
    return _with_notes(meet, list(trees.values()))


def packed_like(like: Any, tree: Any, name: str, words: Words) -> Any:
    """A packed tree, packed as another one is; None if it differs outside modules, or lacks ties that the other has.

    Raises:
        SharingMismatchError: if it differs in more.
    """
    if not require_same_containers(like, tree, name, words):
        return None
    before, after = Graph.of(like, name), Graph.of(tree, name)
    found = joined(before, after, words)
    if not found.fits:
        return None
    return packed_as(tree, like, leaves_like(before, after, found))


def _with_notes(meet: Any, trees: Sequence[Any]) -> Any:
    """The meet of trees, with what is noted of a leaf in any of them (`Structure.noted`, `tied_values`)."""
    noted: tuple[set[int], set[int]] = set(), set()
    for tree in trees:
        own = [module.structure for module in packed_in(tree, 0)]
        if any(structure.is_noted for structure in own):
            met = joined(Graph.of(meet, ""), Graph.of(tree, ""), Words("", "", "")).met
            for structure in own:
                numbers = structure.leaf_numbers
                for marks, places in zip(noted, (structure.noted, structure.tied_values), strict=True):
                    chosen = {numbers[place] for place in places}
                    marks.update(i for i, j in met if j in chosen)

    def marked(packed: Packed) -> Packed:
        structure = packed.structure
        numbers = structure.leaf_numbers
        places = [tuple([k for k, number in enumerate(numbers) if number in marks]) for marks in noted]
        return Packed(packed.leaves, intern(structure.records, structure.root, structure.base, None, *places))

    return with_packed(meet, marked)
