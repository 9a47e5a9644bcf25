"""The differences between a state and a model, as an error or as a `StateReport`.

The *entry* of an object is what the state has for it.
"""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ...core._comparison import Paths, array_text, indented_lines
from ...core._errors import SharingMismatchError, StructureMismatchError
from ...core._node_types import carries_identity, node_type_of
from ...core._printing import MOST_PATHS, printable, shown
from ._state_forms import is_state_leaf

UNEXPECTED = "the state has it, the model does not"
"""The `why` of a misfit for a name that only the state has."""

_CONTAINERS = (list, tuple, dict, collections.deque)


class StateReport(NamedTuple):
    """Report of `load_state(..., strict=False)`: the values that were loaded, and all differences.

    Attributes:
        loaded: the paths of the leaves that came from the state. A shared leaf has one path here.
        left: path → reason, for objects that the model keeps although they are not the empty tuple in the state:
            the state has nothing for them, or nothing that fits.
        unexpected: the paths that only the state has.
        ties: pairs of paths that are one object in only one of the two. The result has the ties of the model. If it has
            one object at both paths, the value is that of the state at the first path.
    """

    loaded: tuple[str, ...]
    left: dict[str, str]
    unexpected: tuple[str, ...]
    ties: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} leaves loaded, {len(self.left)} places left as they were"]
        lines += [f"    `{printable(path)}`: {why}" for path, why in self.left.items()]
        lines += [f"    `{printable(path)}`: {UNEXPECTED}" for path in self.unexpected]
        for path, other_path in self.ties:
            text = f"`{printable(path)}` and `{printable(other_path)}` are one object in one of the two only"
            lines.append(f"    {text}")
        return "\n".join(lines)


class Misfit(NamedTuple):
    """One difference between the model and the state.

    Attributes:
        at: the path, as a number of the `Paths` of the comparison.
        why: the difference in words. For a tie, the side that has it, `"model"` or `"state"`.
        first: for a tie, its first path. None for other differences.
    """

    at: int
    why: str
    first: int | None = None


def error_for(misfits: Sequence[Misfit], paths: Paths) -> StructureMismatchError | SharingMismatchError:
    """Returns one error for all misfits, those of ties last.

    It is a `SharingMismatchError` if all are misfits of ties.
    """
    ties = [misfit for misfit in misfits if misfit.first is not None]
    ordered = [*(misfit for misfit in misfits if misfit.first is None), *ties]
    count, is_of_ties = len(ordered), len(ordered) == len(ties)
    lines = indented_lines([_line_for(misfit, paths) for misfit in ordered[:MOST_PATHS]], count, "… ")
    where = [at for misfit in ordered for at in (misfit.first, misfit.at) if at is not None]
    head = f"The state does not fit the model in {count} {'place' if count == 1 else 'places'}:"
    message = "\n".join([head, *lines, *_fixes(ties, paths, is_of_ties=is_of_ties)])
    return (SharingMismatchError if is_of_ties else StructureMismatchError)(message, _full_paths(where, paths))


def _line_for(misfit: Misfit, paths: Paths) -> str:
    """Returns the line of the error for one misfit, without indentation."""
    text = f"`{printable(paths.text(misfit.at))}`"
    if misfit.first is None:
        return f"{text}: {misfit.why}"
    first_text = f"`{printable(paths.text(misfit.first))}`"
    return f"{first_text} and {text} are one object in the {misfit.why} only"


def _full_paths(places: Iterable[int], paths: Paths) -> tuple[str, ...]:
    """Returns the texts of paths, not shortened."""
    return tuple([paths.text(at, math.inf) for at in places])


def _fixes(ties: Sequence[Misfit], paths: Paths, *, is_of_ties: bool) -> list[str]:
    """Returns the lines of the error with code that helps.

    Args:
        ties: the misfits that are ties.
        paths: the paths of the misfits.
        is_of_ties: True if there are no other misfits.
    """
    fixes: list[str] = []
    # Side → its first tie that the other side lacks.
    first_tie_of = {tie.why: tie for tie in reversed(ties)}
    # `retie` needs two trees of one shape.
    if "model" in first_tie_of and is_of_ties:
        fixes.append(
            "Storage that does not know ties has a copy for each path. Give the state the ties of the model:\n"
            "    state = sharedtree.retie(state, like=sharedtree.state(model))"
        )
    if "state" in first_tie_of:
        tie = first_tie_of["state"]
        first, second = map(printable, _full_paths((tie.first or 0, tie.at), paths))
        fixes.append(
            f"Give the model the tie of the state:\n    model = sharedtree.tie(model, lambda m: (m{first}, m{second}))"
        )
    start = "Or load" if fixes else "Correct the state, or load"
    return [
        *fixes,
        f"{start} the parts that fit, with a report of the others:\n"
        "    model, report = sharedtree.load_state(model, state, strict=False)",
    ]


def report_of(misfits: Sequence[Misfit], loaded: Sequence[int], paths: Paths) -> StateReport:
    """Makes the report of the misfits, and of the leaves that were loaded.

    Args:
        misfits: all differences.
        loaded: the paths of the loaded leaves.
        paths: the texts of the paths.
    """
    left: dict[str, str] = {}
    unexpected: list[str] = []
    ties: list[tuple[str, str]] = []
    for at, why, first in misfits:
        path = paths.text(at, math.inf)
        if first is not None:
            ties.append((paths.text(first, math.inf), path))
        elif why == UNEXPECTED:
            unexpected.append(path)
        else:
            left[path] = why
    return StateReport(_full_paths(loaded, paths), left, tuple(unexpected), tuple(ties))


def word_for_entries(count: int) -> str:
    """Returns the word for so many entries, singular or plural."""
    return "entry" if count == 1 else "entries"


def difference_text(obj: Any, entry: Any) -> str:
    """Prints an object of the model and its entry, which does not fit."""
    entry_text = _object_text(entry)
    # A module in a state, for example.
    if node_type_of(entry) is not None and not isinstance(entry, (*_CONTAINERS, Mapping, type(None))):
        entry_text = f"{entry_text}, which is no plain data"
    return f"the model has {_object_text(obj)}, the state {entry_text}"


def _object_text(obj: Any) -> str:
    """Prints an object of a model or a state in a few words: dtype and shape, the value, or the class."""
    if carries_identity(obj):
        text = array_text(obj)
        if isinstance(obj, jax.ShapeDtypeStruct):
            return f"{text} without a value"
        return f"a reference to {text}" if isinstance(obj, jax.Ref) else text
    if is_state_leaf(obj):
        return shown(obj)
    name = printable(type(obj).__qualname__)
    if isinstance(obj, _CONTAINERS):
        container: Any = obj
        return f"a `{name}` with {len(container)} {word_for_entries(len(container))}"
    return f"a `{name}`" if node_type_of(obj) is not None else f"a `{name}`, which is no state"
