"""In what a state and a model differ, and how that is said."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import tree_util as jtu

from ...core._errors import SharingMismatchError, StructureMismatchError
from ...core._node_types import carries_identity, node_type_of
from ...core._printing import MOST_PATHS, printable, shown
from ._state_forms import is_state_leaf

_UNEXPECTED = "the state has it, the model does not"

_LONGEST = 400
"""A longer path is cut in the middle."""

_CONTAINERS = (list, tuple, dict, collections.deque)

LinkedPath = tuple["LinkedPath", Any] | None
"""The path before, and one key more. Paths share their beginnings, so those of a deep tree take no more than it."""


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
        lines += [f"    `{printable(path)}`: {_UNEXPECTED}" for path in self.unexpected]
        lines += [
            f"    `{printable(a)}` and `{printable(b)}` are one object in one of the two only" for a, b in self.ties
        ]
        return "\n".join(lines)


class Misfits:
    """Collects them, in the order in which they are met."""

    def __init__(self) -> None:
        self.left: list[tuple[LinkedPath, str]] = []
        self.unexpected: list[LinkedPath] = []
        self.ties: list[tuple[LinkedPath, LinkedPath, str]] = []
        self._in_order: list[tuple[LinkedPath, str]] = []

    def leave(self, path: LinkedPath, why: str) -> None:
        """The model keeps what it has at a path."""
        self.left.append((path, why))
        self._in_order.append((path, why))

    def not_expect(self, path: LinkedPath) -> None:
        """The state has something at a path where the model has nothing."""
        self.unexpected.append(path)
        self._in_order.append((path, _UNEXPECTED))

    def differ_in_tie(self, first: LinkedPath, second: LinkedPath, whose: str) -> None:
        """Two paths are one object in the `whose`, "model" or "state", only."""
        self.ties.append((first, second, whose))

    def error(self) -> StructureMismatchError | SharingMismatchError | None:
        """One error for all of them; None if there is none."""
        if not self.ties and not self._in_order:
            return None
        lines = [f"    `{_printed(path)}`: {why}" for path, why in self._in_order[:MOST_PATHS]]
        for first, second, whose in self.ties[: MOST_PATHS - len(lines)]:
            lines.append(f"    `{_printed(first)}` and `{_printed(second)}` are one object in the {whose} only")
        count = len(self._in_order) + len(self.ties)
        if count > len(lines):
            lines.append(f"    … and {count - len(lines)} more")
        paths = [path_text(path) for path, _ in self._in_order]
        paths += [path_text(path) for first, second, _ in self.ties for path in (first, second)]
        head = f"The state does not fit the model in {count} {'place' if count == 1 else 'places'}:"
        message = "\n".join([head, *lines, *self._fixes()])
        return (StructureMismatchError if self._in_order else SharingMismatchError)(message, paths)

    def _fixes(self) -> list[str]:
        found: list[str] = []
        sides = {whose: (first, second) for first, second, whose in reversed(self.ties)}
        if "model" in sides and not self._in_order:
            found.append(
                "Storage that does not know ties has a copy for each path. Give the state the ties of the model:\n"
                "    state = sharedtree.retie(state, like=sharedtree.state(model))"
            )
        if "state" in sides:
            first, second = (printable(path_text(path)) for path in sides["state"])
            found.append(
                "What is one object in the state can be loaded into a model that has it as one, too:\n"
                f"    model = sharedtree.tie(model, lambda m: (m{first}, m{second}))"
            )
        return [
            *found,
            "To load what fits, and be told the rest:\n"
            "    model, report = sharedtree.load_state(model, state, strict=False)",
        ]

    def report(self, loaded: Sequence[LinkedPath]) -> StateReport:
        """The same for programs."""
        return StateReport(
            tuple(map(path_text, loaded)),
            {path_text(path): why for path, why in self.left},
            tuple(map(path_text, self.unexpected)),
            tuple([(path_text(first), path_text(second)) for first, second, _ in self.ties]),
        )


def path_text(path: LinkedPath) -> str:
    """A path as `jax.tree_util.keystr` prints it."""
    keys: collections.deque[Any] = collections.deque()
    while path is not None:
        path, key = path
        keys.appendleft(key)
    return jtu.keystr(tuple(keys))


def _printed(path: LinkedPath) -> str:
    text = printable(path_text(path))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"


def entries(count: int) -> str:
    """One, or several."""
    return "entry" if count == 1 else "entries"


def differing(obj: Any, given: Any) -> str:
    """What the model and the state have, where that of the state cannot take the place of the other."""
    theirs = described(given)
    if node_type_of(given) is not None and not isinstance(given, (*_CONTAINERS, Mapping, type(None))):
        theirs = f"{theirs}, which is no plain data"
    return f"the model has {described(obj)}, the state {theirs}"


def described(obj: Any) -> str:
    """What an object of a model or a state is."""
    if carries_identity(obj):
        text = f"{obj.dtype}[{', '.join(map(str, obj.shape))}]"
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
