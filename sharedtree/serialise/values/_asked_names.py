"""What a file asks for: each name in it, where it stands, and whether it may be had.

Nothing here builds anything of the file's. Only modules on the allow-list are imported.
"""

from typing import NamedTuple

from ..trust._trust import Kind, Trust
from ._called import name_of_method
from ._kinds import steps
from ._nodes import Manifest

_MAX_TEXT = 200
_MAX_PATHS = 3


class Request(NamedTuple):
    """One name that a file asks for.

    Attributes:
        name: `module:qualname`.
        kind: `"class"`, `"function"` or `"method"`.
        paths: the first few places in the tree; a part that many share is named through its first place.
        allowed: whether the allow-list has it.
        found: whether it leads to an object.
        why: what keeps it from being allowed or found; empty if nothing does.
        elsewhere: of a name that every file may have, but whose package would come from where nothing is installed (the
            current directory, say): that place. Nothing of it was run. Import the package first if it is yours.
    """

    name: str
    kind: Kind
    paths: tuple[str, ...]
    allowed: bool
    found: bool
    why: str
    elsewhere: str = ""


def audit(manifest: Manifest, trust: Trust | None = None) -> tuple[Request, ...]:
    """Lists each name that a file asks for, without building anything.

    Args:
        manifest: the file's.
        trust: the allow-list to judge by. Default: the built-in one, and what `trust` added for this process.

    Returns:
        One request for each name, in the order of the file.
    """
    trust = Trust() if trust is None else trust
    where = paths_of_names(manifest)
    requests = []
    for kind, name in manifest.names:
        verdict = trust.resolve(name, _kind(kind))
        paths = where.get((kind, name), ())
        requests.append(
            Request(name, _kind(kind), paths, verdict.allowed, verdict.found, verdict.why, verdict.elsewhere)
        )
    return tuple(requests)


def paths_of_names(manifest: Manifest) -> dict[tuple[str, str], tuple[str, ...]]:
    """For each name, where it stands first; at most three places."""
    parents = _first_parents(manifest)
    names = set(manifest.names)
    owners = [entry.name for entry in manifest.types]
    found: dict[tuple[str, str], list[str]] = {}

    def note(key: tuple[str, str], number: int, step: str) -> None:
        places = found.setdefault(key, [])
        if len(places) < _MAX_PATHS:
            places.append(_path(parents, number) + step)

    if type(manifest.root) is list:
        note((manifest.root[0], manifest.root[1] if len(manifest.root) > 1 else ""), -1, "")
    for number in sorted(parents):
        node = manifest.nodes[number]
        if node[0] in ("object", "wrapper", "registered", "enum"):
            note(("class", manifest.types[node[1]].name), number, "")
        method = name_of_method(owners, manifest.nodes, node)
        if method is not None:
            note(("method", method), number, "")
        for child, step in steps(manifest, node):
            if type(child) is list and len(child) == 2 and (child[0], child[1]) in names:
                note((child[0], child[1]), number, step)
    return {key: tuple(places) for key, places in found.items()}


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


def _kind(kind: str) -> Kind:
    return kind if kind in ("class", "method") else "function"
