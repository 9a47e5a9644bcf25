"""In what a state and a model differ, and how that is said."""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ...core._comparison import Paths, array_text, lines_of
from ...core._errors import SharingMismatchError, StructureMismatchError
from ...core._node_types import carries_identity, node_type_of
from ...core._printing import MOST_PATHS, printable, shown
from ._state_forms import is_state_leaf

UNEXPECTED = "the state has it, the model does not"

_CONTAINERS = (list, tuple, dict, collections.deque)


class StateReport(NamedTuple):
    """What `load_state(..., strict=False)` did.

    Attributes:
        loaded: the paths of the leaves that came from the state, each shared one once.
        left: path → why, of what the model has and the state has nothing for that fits. The model's is kept.
        unexpected: the paths of what the state has and the model does not.
        ties: pairs of paths that are one object in one of the two only. The result has the ties of the model, and where
            it has one object, what the state has at the first of the paths.
    """

    loaded: tuple[str, ...]
    left: dict[str, str]
    unexpected: tuple[str, ...]
    ties: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} leaves loaded, {len(self.left)} places left as they were"]
        lines += [f"    `{printable(path)}`: {why}" for path, why in self.left.items()]
        lines += [f"    `{printable(path)}`: {UNEXPECTED}" for path in self.unexpected]
        lines += [
            f"    `{printable(a)}` and `{printable(b)}` are one object in one of the two only" for a, b in self.ties
        ]
        return "\n".join(lines)


class Misfit(NamedTuple):
    """One thing in which they differ.

    Attributes:
        at: where, a number of the paths of the comparison.
        why: what differs. Of a tie, whose it is, the "model" or the "state".
        first: of what is one object in one of the two only, where it is besides.
    """

    at: int
    why: str
    first: int | None = None


def error_for(misfits: Sequence[Misfit], paths: Paths) -> StructureMismatchError | SharingMismatchError:
    """One error for all of them, those of ties last."""
    ties = [each for each in misfits if each.first is not None]
    ordered = [*(each for each in misfits if each.first is None), *ties]
    count, is_of_ties = len(ordered), len(ordered) == len(ties)
    lines = lines_of([_line(each, paths) for each in ordered[:MOST_PATHS]], count, "… ")
    where = [at for each in ordered for at in (each.first, each.at) if at is not None]
    head = f"The state does not fit the model in {count} {'place' if count == 1 else 'places'}:"
    message = "\n".join([head, *lines, *_fixes(ties, paths, is_of_ties=is_of_ties)])
    return (SharingMismatchError if is_of_ties else StructureMismatchError)(message, _whole(where, paths))


def _line(misfit: Misfit, paths: Paths) -> str:
    at, first = (f"`{printable(paths.text(each or 0))}`" for each in (misfit.at, misfit.first))
    of_tie = f"{first} and {at} are one object in the {misfit.why} only"
    return f"{at}: {misfit.why}" if misfit.first is None else of_tie


def _whole(places: Iterable[int], paths: Paths) -> tuple[str, ...]:
    return tuple([paths.text(at, math.inf) for at in places])


def _fixes(ties: Sequence[Misfit], paths: Paths, *, is_of_ties: bool) -> list[str]:
    found: list[str] = []
    first_of = {tie.why: tie for tie in reversed(ties)}
    if "model" in first_of and is_of_ties:
        found.append(
            "Storage that does not know ties has a copy for each path. Give the state the ties of the model:\n"
            "    state = sharedtree.retie(state, like=sharedtree.state(model))"
        )
    if "state" in first_of:
        first, second = map(printable, _whole((first_of["state"].first or 0, first_of["state"].at), paths))
        found.append(
            "What is one object in the state can be loaded into a model that has it as one, too:\n"
            f"    model = sharedtree.tie(model, lambda m: (m{first}, m{second}))"
        )
    return [
        *found,
        "To load what fits, and be told the rest:\n"
        "    model, report = sharedtree.load_state(model, state, strict=False)",
    ]


def report_of(misfits: Sequence[Misfit], loaded: Sequence[int], paths: Paths) -> StateReport:
    """The same for programs, with the places of the leaves that were loaded."""
    others = [each for each in misfits if each.first is None]
    ties = [_whole((first, at), paths) for at, _, first in misfits if first is not None]
    return StateReport(
        _whole(loaded, paths),
        {paths.text(at, math.inf): why for at, why, _ in others if why != UNEXPECTED},
        _whole((each.at for each in others if each.why == UNEXPECTED), paths),
        tuple([(first, second) for first, second in ties]),
    )


def entries(count: int) -> str:
    """One, or several."""
    return "entry" if count == 1 else "entries"


def differing(obj: Any, given: Any) -> str:
    """What the model and the state have, where that of the state cannot take the place of the other."""
    theirs = _told(given)
    if node_type_of(given) is not None and not isinstance(given, (*_CONTAINERS, Mapping, type(None))):
        theirs = f"{theirs}, which is no plain data"
    return f"the model has {_told(obj)}, the state {theirs}"


def _told(obj: Any) -> str:
    """What an object of a model or a state is."""
    if carries_identity(obj):
        text = array_text(obj)
        if isinstance(obj, jax.ShapeDtypeStruct):
            return f"{text} without a value"
        return f"a reference to {text}" if isinstance(obj, jax.Ref) else text
    if is_state_leaf(obj):
        return shown(obj)
    name = printable(type(obj).__qualname__)
    if isinstance(obj, _CONTAINERS):
        found: Any = obj
        return f"a `{name}` with {len(found)} {entries(len(found))}"
    return f"a `{name}`" if node_type_of(obj) is not None else f"a `{name}`, which is no state"
