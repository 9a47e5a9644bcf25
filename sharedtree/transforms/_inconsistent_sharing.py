"""The error for one object that a transform would treat in several ways: its paths, what each means, and the fix.

A DAG of depth 60 can have 2^60 paths to one leaf. So only edges that lead to the leaf are followed, and the error names
at most the first eight paths of each treatment.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import jax
from jax import tree_util as jtu

from ..core._call_arguments import LeafPath
from ..core._errors import InconsistentSharingError
from ..core._structure import LEAF, Path
from ._leaf_labels import Outcomes, Visit

MAX_PATHS = 8
"""Number of paths of each treatment that an error names."""


def raise_inconsistent(outcomes: Outcomes, record: int, transform: str, reason: str = "") -> NoReturn:
    """Raises the error for a record that has a conflict. It names the paths of one leaf below it that has one, too.

    Args:
        outcomes: outcomes of every record.
        record: number of the record.
        transform: name of the transform.
        reason: why this is refused; it ends a line. Empty for the usual reason.
    """
    obj, leaf = outcomes.tree.objects[record], _leaf_with_conflict(outcomes, record)
    if not reason and not isinstance(obj, jax.Ref) and outcomes.tree.node(record) is not None:
        reason = (
            f"Arrays that are treated differently become two, but not what a shared `{type(obj).__name__}` holds.\n"
        )
    advice = reason + outcomes.treatment.advice(_leaves_below(outcomes, record))
    raise inconsistent_sharing_error(find_occurrences(outcomes, leaf), transform, advice)


def raise_inconsistent_result(outcomes: Outcomes, record: int, transform: str) -> NoReturn:
    """Raises the error for a record of what a function returned."""
    occurrences = find_occurrences(outcomes, _leaf_with_conflict(outcomes, record))
    in_result = [
        Occurrence((LeafPath("result"), *occurrence.path), occurrence.treatment)
        for occurrence in occurrences.first_ones
    ]
    occurrences = Occurrences(in_result, occurrences.unfinished, [])
    lines = (
        f"{_first_lines(occurrences, transform)}\n{outcomes.treatment.advice(_leaves_below(outcomes, record))}"
        "Or let the function give each path an array of its own before it returns:\n"
        "    result = sharedtree.untie(result)"
    )
    raise InconsistentSharingError(lines, occurrences.paths, occurrences.treatments)


class Occurrence(NamedTuple):
    """One path of a leaf, beginning with the argument, and what the transform does with the leaf there."""

    path: Path
    treatment: str


class Occurrences(NamedTuple):
    """Where a leaf is.

    Attributes:
        first_ones: the first `MAX_PATHS` of each treatment, in flatten order.
        unfinished: treatments that have more than these.
        arguments: for each treatment, names of the arguments in which it occurs.
    """

    first_ones: list[Occurrence]
    unfinished: list[str]
    arguments: list[list[str]]

    @property
    def paths(self) -> list[str]:
        """The paths as errors print them."""
        return [jtu.keystr(occurrence.path) for occurrence in self.first_ones]

    @property
    def treatments(self) -> list[str]:
        """The treatment at each path, in words."""
        return [occurrence.treatment for occurrence in self.first_ones]

    @property
    def lines(self) -> list[str]:
        """Lines of a message, one for each path, then one for each treatment that has more."""
        lines = [f"    `{path}`: {treatment}" for path, treatment in zip(self.paths, self.treatments, strict=True)]
        return lines + [f"    … and more: {treatment}" for treatment in self.unfinished]


def find_occurrences(outcomes: Outcomes, leaf: int) -> Occurrences:
    """Finds where a leaf is, and what the transform does with it there.

    Cost: linear in the visits, plus the length of the named paths.
    """
    treatments_below = _treatments_below(outcomes, leaf)
    counts: dict[str, int] = {}
    first_ones: list[Occurrence] = []
    full: set[str] = set()
    stack: list[tuple[Visit, Path]] = [(outcomes.root, ())]
    while stack:
        visit, path = stack.pop()
        # Not followed: an edge that leads nowhere, or only to treatments with enough paths. Else this is exponential.
        if treatments_below[visit] <= full:
            continue
        if visit.record == leaf:
            treatment = outcomes.description(visit)
            counts[treatment] = counts.get(treatment, 0) + 1
            if counts[treatment] <= MAX_PATHS:
                first_ones.append(Occurrence(path, treatment))
            else:
                full.add(treatment)
            continue
        node = outcomes.tree.node(visit.record)
        assert node is not None
        children = list(zip(node.keys, outcomes.children(visit), strict=True))
        stack.extend([(child, (*path, key)) for key, child in reversed(children)])
    arguments = _arguments_by_treatment(outcomes, treatments_below, list(counts))
    return Occurrences(first_ones, [treatment for treatment in counts if treatment in full], arguments)


def _treatments_below(outcomes: Outcomes, leaf: int) -> dict[Visit, frozenset[str]]:
    """For each visit, what the transform does with one leaf below it, in words. Empty if the leaf is not below it."""
    treatments: dict[Visit, frozenset[str]] = {}
    # Children come before their parents.
    for visit in outcomes.visits():
        here = {outcomes.description(visit)} if visit.record == leaf else set[str]()
        treatments[visit] = frozenset(here.union(*[treatments[child] for child in outcomes.children(visit)]))
    return treatments


def _arguments_by_treatment(
    outcomes: Outcomes, treatments_below: Mapping[Visit, frozenset[str]], treatments: list[str]
) -> list[list[str]]:
    """For each treatment, names of the arguments below which it occurs."""
    root = outcomes.tree.node(outcomes.root.record)
    assert root is not None
    arguments = [
        (str(key), treatments_below[child])
        for key, child in zip(root.keys, outcomes.children(outcomes.root), strict=True)
    ]
    return [[name for name, below in arguments if treatment in below] for treatment in treatments]


def _leaf_with_conflict(outcomes: Outcomes, record: int) -> int:
    """Finds a leaf below a record, both of which have a conflict."""
    first, second, *_ = outcomes.conflicts()[record]
    # A node's outcome is the tuple of its children's, so where two of it differ, so do those of some child.
    while outcomes.tree.records[first.record][0] is not LEAF:
        pairs = zip(outcomes.children(first), outcomes.children(second), strict=True)
        first, second = next((a, b) for a, b in pairs if outcomes[a] != outcomes[b])
    return first.record


def _leaves_below(outcomes: Outcomes, record: int) -> list[Any]:
    """The leaves below a record that has a conflict, each once."""
    tree = outcomes.tree
    visit = outcomes.conflicts()[record][0]
    records = dict.fromkeys(reached.record for reached in sorted(outcomes.reachable_from(visit)))
    return [tree.objects[number] for number in records if tree.records[number][0] is LEAF]


def _first_lines(occurrences: Occurrences, transform: str) -> str:
    return "\n".join([f"One object, but `{transform}` would treat its occurrences differently:", *occurrences.lines])


def inconsistent_sharing_error(occurrences: Occurrences, transform: str, advice: str) -> InconsistentSharingError:
    """Makes the error for a leaf that would be treated in several ways.

    Args:
        occurrences: where the leaf is.
        transform: name of the transform.
        advice: text before the usual fix; it ends a line.
    """
    text = f"{_first_lines(occurrences, transform)}\n{advice}{_fix(occurrences)}"
    return InconsistentSharingError(text, occurrences.paths, occurrences.treatments)


def _fix(occurrences: Occurrences) -> str:
    """The fix that always works: an object of its own for each treatment."""
    groups = occurrences.arguments
    arguments = list(dict.fromkeys(name for group in groups for name in group))
    targets = ", ".join(arguments)
    advice = "Treat them alike, or give each an object of its own before the call:\n"
    # One argument holds occurrences of two treatments, so a copy of that argument would hold both again.
    if sum(map(len, groups)) > len(arguments):
        value = f"({targets})" if len(arguments) > 1 else targets
        return f"{advice}    {targets} = sharedtree.untie({value})"
    lines: list[str] = []
    for group in groups[1:]:
        names = ", ".join(group)
        lines.append(f"    {names} = sharedtree.copy({f'({names})' if len(group) > 1 else names})")
    if len(arguments) == 2:
        lines += ["or, with a copy of what they share only:"]
        lines += [f"    {targets} = sharedtree.untie(({targets}), lambda t: t[1:])"]
    return advice + "\n".join(lines)
