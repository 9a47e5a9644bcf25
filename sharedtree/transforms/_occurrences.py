"""Every way from the roots of a DAG to some of its places, in words, without unfolding it.

A DAG of depth 60 can have 2^60 paths to one leaf. So paths are counted where they run together, and only so many are
written down.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from .._structure import Path
from .._text import MOST_PATHS
from ._crossed import Position

"""That one message names; of more it gives the number."""

_UNCOUNTED = 10**9
"""Larger numbers of paths are given as a power of two: some have more digits than Python prints."""

Place = TypeVar("Place", bound=Hashable)


class Root(NamedTuple, Generic[Place]):
    """Where paths begin: the argument, the path in it, and the place to which that leads."""

    position: Position
    path: Path
    place: Place


class Occurrences(NamedTuple):
    """Where something occurs, and how it is treated there.

    Attributes:
        paths: the first ones, each beginning with the name of its argument.
        treatments: one for each path.
        lines: the same as lines of a message, and how many more there are.
        positions: treatment → the arguments in which something has it.
    """

    paths: list[str]
    treatments: list[str]
    lines: list[str]
    positions: dict[str, list[Position]]


def occurrences(
    roots: Sequence[Root[Place]],
    below: Callable[[Place], Sequence[tuple[object, Place]]],
    treatment_at: Callable[[Position, Place], str | None],
    text: Callable[[Position, Path], str],
) -> Occurrences:
    """Lists where something occurs.

    Args:
        roots: where to begin.
        below: place → (key, place) of each of its children.
        treatment_at: how what is sought is treated, if it is at this place.
        text: argument and path → words.

    Cost: linear in the places, but for the paths that are written down.
    """
    counts = [_counted(root, below, treatment_at) for root in roots]
    total: Counter[str] = Counter()
    positions: dict[str, list[Position]] = {}
    for root, count in zip(roots, counts, strict=True):
        total.update(count[root.place])
        for treatment in count[root.place]:
            if root.position not in positions.setdefault(treatment, []):
                positions[treatment].append(root.position)
    named: list[tuple[str, str]] = []
    more: list[str] = []
    # If all fit, in the order in which a walk meets them; otherwise some of each treatment.
    few = sum(total.values()) <= MOST_PATHS
    for some in [set(total)] if few else [{treatment} for treatment in total]:
        room = MOST_PATHS if few else max(1, MOST_PATHS // len(total))
        for root, count in zip(roots, counts, strict=True):
            for path, treatment in _paths_to(root, count, some, below, treatment_at):
                if room:
                    named.append((text(root.position, path), treatment))
                room -= 1
                if room < 0:
                    break
        if not few:
            (treatment,) = some
            left = total[treatment] - sum(each == treatment for _, each in named)
            more += [f"    … and {_number(left)} more: {treatment}"] if left else []
    lines = [f"    `{path}`: {treatment}" for path, treatment in named] + more
    return Occurrences([path for path, _ in named], [treatment for _, treatment in named], lines, positions)


def _counted(
    root: Root[Place],
    below: Callable[[Place], Sequence[tuple[object, Place]]],
    treatment_at: Callable[[Position, Place], str | None],
) -> dict[Place, Counter[str]]:
    """How many paths lead from each place to what is sought, by its treatment there."""
    counts: dict[Place, Counter[str]] = {}
    stack = [root.place]
    while stack:
        place = stack[-1]
        children = [child for _, child in below(place)]
        missing = [child for child in children if child not in counts]
        if place not in counts and missing:
            stack.extend(missing)
            continue
        stack.pop()
        if place in counts:
            continue
        counts[place] = count = Counter[str]()
        for child in children:
            count.update(counts[child])
        here = treatment_at(root.position, place)
        if here is not None:
            count[here] += 1
    return counts


def _paths_to(
    root: Root[Place],
    counts: dict[Place, Counter[str]],
    treatments: set[str],
    below: Callable[[Place], Sequence[tuple[object, Place]]],
    treatment_at: Callable[[Position, Place], str | None],
) -> Iterator[tuple[Path, str]]:
    stack: list[tuple[Place, Path]] = [(root.place, root.path)]
    while stack:
        place, path = stack.pop()
        if treatments.isdisjoint(counts[place]):
            continue
        here = treatment_at(root.position, place)
        if here in treatments:
            yield path, here
        stack.extend((child, (*path, key)) for key, child in reversed(below(place)))


def _number(count: int) -> str:
    return str(count) if count < _UNCOUNTED else f"more than 2^{count.bit_length() - 1}"
