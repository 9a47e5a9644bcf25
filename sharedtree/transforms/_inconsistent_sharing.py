"""One object that would be treated in several ways: the error names its paths, what each means, and the fix.

A DAG of depth 60 can have 2^60 paths to one leaf. So only ways that lead to it are gone, and of each treatment the
first eight paths are named.
"""

from typing import Any, NamedTuple, NoReturn

import jax
from jax import tree_util as jtu

from ..core._call_arguments import LeafPath
from ..core._errors import InconsistentSharingError
from ..core._structure import LEAF, Path
from ._leaf_labels import Fates, Way

MOST = 8
"""Paths of each treatment that an error names."""


class Occurrence(NamedTuple):
    """Where a leaf is, beginning with the argument, and what becomes of it there."""

    path: Path
    treatment: str


class Occurrences(NamedTuple):
    """Where a leaf is.

    Attributes:
        found: the first ones of each treatment, in the order of a walk.
        more: the treatments of which there are more.
        arguments: for each treatment, the arguments in which something has it.
    """

    found: list[Occurrence]
    more: list[str]
    arguments: list[list[str]]

    @property
    def paths(self) -> list[str]:
        """The paths as errors print them."""
        return [jtu.keystr(each.path) for each in self.found]

    @property
    def treatments(self) -> list[str]:
        """One for each path."""
        return [each.treatment for each in self.found]

    @property
    def lines(self) -> list[str]:
        """Paths and treatments as lines of a message."""
        named = [f"    `{path}`: {treatment}" for path, treatment in zip(self.paths, self.treatments, strict=True)]
        return named + [f"    … and more: {treatment}" for treatment in self.more]


def occurrences(fates: Fates, leaf: int) -> Occurrences:
    """Where a leaf is, and what becomes of it there. Cost: linear in the ways, but for the paths that are named."""
    leads_there: dict[Way, bool] = {}
    for way in fates.ways():  # what is below comes first
        leads_there[way] = way[0] == leaf or any(leads_there[below] for below in fates.below(way))
    counts: dict[str, int] = {}
    found: list[Occurrence] = []
    # What leads to nothing but treatments of which enough was named need not be gone.
    reached: dict[Way, frozenset[str]] = {}
    for way in leads_there:
        own = {fates.described(way)} if way[0] == leaf else set[str]()
        reached[way] = frozenset(own.union(*[reached[below] for below in fates.below(way) if leads_there[below]]))
    stack: list[tuple[Way, Path]] = [(fates.root, ())]
    full: set[str] = set()
    while stack:
        way, path = stack.pop()
        if not leads_there[way] or reached[way] <= full:
            continue
        if way[0] == leaf:
            treatment = fates.described(way)
            counts[treatment] = counts.get(treatment, 0) + 1
            if counts[treatment] <= MOST:
                found.append(Occurrence(path, treatment))
            else:
                full.add(treatment)
            continue
        node = fates.tree.node(way[0])
        assert node is not None
        steps = list(zip(node.keys, fates.below(way), strict=True))
        stack.extend([(below, (*path, key)) for key, below in reversed(steps)])
    node = fates.tree.node(fates.root[0])
    assert node is not None
    roots = [(str(key), reached[below]) for key, below in zip(node.keys, fates.below(fates.root), strict=True)]
    arguments = [[name for name, treatments in roots if each in treatments] for each in counts]
    return Occurrences(found, [each for each in counts if each in full], arguments)


def raise_inconsistent(fates: Fates, number: int, transform: str, why: str = "") -> NoReturn:
    """Raises the error for a record with several fates, about a leaf in it that has several, too."""
    obj, leaf = fates.tree.objects[number], _leaf_with_several(fates, number)
    if not why and not isinstance(obj, jax.Ref) and fates.tree.node(number) is not None:
        why = f"Arrays that are treated differently become two, but not what a shared `{type(obj).__name__}` holds.\n"
    raise error_of(occurrences(fates, leaf), transform, why + fates.treatment.advice(_leaves_in(fates, number)))


def raise_inconsistent_result(fates: Fates, number: int, transform: str) -> NoReturn:
    """Raises the same error about a record of what a function returned."""
    found = occurrences(fates, _leaf_with_several(fates, number))
    found = Occurrences(
        [Occurrence((LeafPath("result"), *each.path), each.treatment) for each in found.found], found.more, []
    )
    lines = (
        f"{_head(found, transform)}\n{fates.treatment.advice(_leaves_in(fates, number))}"
        "Or let the function give each path an array of its own before it returns:\n"
        "    result = sharedtree.untie(result)"
    )
    raise InconsistentSharingError(lines, found.paths, found.treatments)


def _leaf_with_several(fates: Fates, number: int) -> int:
    """A leaf in a record with several fates that has several, too."""
    first, second, *_ = fates.several()[number]
    while fates.tree.records[first[0]][0] is not LEAF:
        both = zip(fates.below(first), fates.below(second), strict=True)
        first, second = next((a, b) for a, b in both if fates[a] != fates[b])
    return first[0]


def _leaves_in(fates: Fates, number: int) -> list[Any]:
    tree = fates.tree
    below = dict.fromkeys(way[0] for way in sorted(fates.ways_from(fates.several()[number][0])))
    return [tree.objects[n] for n in below if tree.records[n][0] is LEAF]


def _head(found: Occurrences, transform: str) -> str:
    return "\n".join([f"One object, but `{transform}` would treat its occurrences differently:", *found.lines])


def error_of(found: Occurrences, transform: str, advice: str) -> InconsistentSharingError:
    """The error for a leaf that would be treated in several ways, with advice that ends a line."""
    text = f"{_head(found, transform)}\n{advice}{part_them(found)}"
    return InconsistentSharingError(text, found.paths, found.treatments)


def part_them(found: Occurrences) -> str:
    """The fix that always works: give the occurrences that are treated differently objects of their own."""
    groups = found.arguments
    involved = list(dict.fromkeys(text for group in groups for text in group))
    together = ", ".join(involved)
    advice = "Treat them alike, or give each an object of its own before the call:\n"
    if sum(map(len, groups)) > len(involved):  # one argument holds both
        several = f"({together})" if len(involved) > 1 else together
        return f"{advice}    {together} = sharedtree.untie({several})"
    copied = [(", ".join(group), f"({', '.join(group)})" if len(group) > 1 else group[0]) for group in groups[1:]]
    lines = [f"    {names_of} = sharedtree.copy({several})" for names_of, several in copied]
    if len(involved) == 2:
        lines += ["or, with a copy of what they share only:"]
        lines += [f"    {together} = sharedtree.untie(({together}), lambda t: t[1:])"]
    return advice + "\n".join(lines)
