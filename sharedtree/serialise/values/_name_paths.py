"""Where each name of a manifest stands in its tree, and what becomes of the names."""

from collections.abc import Mapping
from typing import Any, cast

from ..trust._asked import Name, Paths, Request, judge_all, resolve_all
from ..trust._trust import Trust
from ._called import name_of_method
from ._evolution import Renames, require_sound_renames
from ._kinds import steps
from ._nodes import Manifest

_MAX_TEXT = 200
_MAX_PATHS = 3

Resolved = Mapping[tuple[str, ...], Any]
"""The object of each name: (`"class"` or `"function"`, name) → object."""


def resolve(manifest: Manifest, trust: Trust | None = None, renames: Renames | None = None) -> Resolved:
    """What the names in a manifest lead to. Arguments and errors are those of `decode`."""
    renames = {} if renames is None else renames
    require_sound_renames(renames)
    return resolve_all(_names(manifest), lambda: paths_of_names(manifest), trust or Trust(), renames)


def audit(manifest: Manifest, trust: Trust | None = None) -> tuple[Request, ...]:
    """Each name that a file asks for, without building anything."""
    return judge_all(_names(manifest), paths_of_names(manifest), trust or Trust())


def _names(manifest: Manifest) -> tuple[Name, ...]:
    return cast("tuple[Name, ...]", manifest.names)


def paths_of_names(manifest: Manifest) -> Paths:
    """For each name, where it stands first; at most three places."""
    parents = _first_parents(manifest)
    names = set(manifest.names)
    owners = [entry.name for entry in manifest.types]
    found: dict[Any, tuple[str, ...]] = {}

    def note(kind: str, name: str, number: int, step: str) -> None:
        places = found.get((kind, name), ())
        if len(places) < _MAX_PATHS:
            found[kind, name] = (*places, _path(parents, number) + step)

    if type(manifest.root) is list:
        note(manifest.root[0], manifest.root[-1], -1, "")
    for number in sorted(parents):
        node = manifest.nodes[number]
        if node[0] in ("object", "wrapper", "registered", "enum"):
            note("class", manifest.types[node[1]].name, number, "")
        method = name_of_method(owners, manifest.nodes, node)
        if method is not None:
            note("method", method, number, "")
        for child, step in steps(manifest, node):
            if type(child) is list and len(child) == 2 and (child[0], child[1]) in names:
                note(child[0], child[1], number, step)
    return found


def _first_parents(manifest: Manifest) -> dict[int, tuple[int, str]]:
    """For each node below the root, the node that it was first reached from, and how."""
    if type(manifest.root) is not int:
        return {}
    parents: dict[int, tuple[int, str]] = {manifest.root: (-1, "")}
    for number in range(manifest.root, -1, -1):  # children stand before their parents
        if number in parents:
            for child, step in steps(manifest, manifest.nodes[number]):
                if type(child) is int:
                    parents.setdefault(child, (number, step))
    return parents


def _path(parents: dict[int, tuple[int, str]], number: int) -> str:
    texts: list[str] = []
    length = 0
    while number in parents and length < _MAX_TEXT:
        number, step = parents[number]
        texts.append(step)
        length += len(step)
    return ("..." if number in parents else "") + "".join(reversed(texts))
