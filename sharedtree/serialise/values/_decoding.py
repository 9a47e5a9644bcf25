"""Manifest and arrays → DAG, node by node.

Children stand before their parents in a manifest, so one pass from first to last builds everything, and nothing
recurses. Names are resolved before anything is built. What is called is: the flatten and unflatten functions, hooks and
default factories of trusted classes, and their hashes where they are keys; never what the file says.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from ..._errors import FormatError, SharedTreeError, StructureMismatchError
from ..._printable import printable
from ..arrays._arrays import finish
from ..container._header import malformed
from ..trust._asked import Name, Paths, Request, judge_all, resolve_all
from ..trust._classes import FIELD_KINDS, kind_of
from ..trust._trust import Trust
from ._atoms import DistinctNans, is_nan
from ._called import name_of_method
from ._evolution import Renames, builder, require_sound_renames
from ._kinds import BUILDERS, nested_too_deeply, num_keys, steps
from ._nodes import Collisions, Manifest, Parts, TypeEntry, most_collisions
from ._touched import first_touched, has_dags, walked_in

_MAX_TEXT = 200
_MAX_PATHS = 3

Resolved = Mapping[tuple[str, ...], Any]
"""The object of each name: (`"class"` or `"function"`, name) → object."""


def decode(
    manifest: Manifest,
    array_of: Callable[[int], Any],
    trust: Trust | None = None,
    renames: Renames | None = None,
    resolved: Resolved | None = None,
) -> Any:
    """Builds the DAG that a manifest describes.

    Args:
        manifest: a manifest that was parsed.
        array_of: index into the manifest's `arrays` → the array, of the entry's dtype and shape, JAX's or NumPy's as it
            says; of PRNG keys, the raw data. Called once for each array, in the order of the nodes. Its errors pass
            through.
        trust: what the file may name. Default: the built-in list, and what `trust` added for this process.
        renames: what was renamed or dropped since: see `Renames`. A class given as such is trusted.
        resolved: what `resolve` made of the names, if that was asked before.

    Returns:
        The tree. What is one node in the manifest is one object in it.

    Raises:
        UntrustedTypeError: if the file names what it may not. All such names are listed, and nothing was built.
        StructureMismatchError: if a name leads nowhere, a class has changed, or devices are missing.
        FormatError: if the manifest describes what cannot be built.

    Cost: one pass over the nodes; arrays are those of `array_of`, not copied but for weak types and PRNG keys.
    """
    renames = {} if renames is None else renames
    has_nans = any(map(is_nan, manifest.atoms.values()))
    values: dict[tuple[str, ...], Any] = DistinctNans(manifest.atoms) if has_nans else dict(manifest.atoms)
    values.update(resolve(manifest, trust, renames) if resolved is None else resolved)
    makers = [_maker(entry, values["class", entry.name], renames) for entry in manifest.types]
    fields = [entry.fields for entry in manifest.types]
    classes = [values["class", entry.name] for entry in manifest.types]
    touched = first_touched(manifest.nodes, classes)
    if touched is not None:
        raise FormatError(
            f"Node {touched} of the file, a `{manifest.nodes[touched][0]}`, has an object of Flax NNX, or a `Module`, "
            "where something would look at it while the file is loaded. No save would write that."
        )
    deep = nested_too_deeply(manifest.nodes, walked_in(classes)) if has_dags(classes) else None
    if deep is not None:
        raise malformed(
            f"node {deep}, a `{manifest.nodes[deep][0]}`, is nested too deeply, or holds one thing too often"
        )
    parts = Parts(values, makers, fields, Collisions(most_collisions(num_keys(manifest.nodes))))
    table, entries = parts.table, manifest.arrays
    for node in manifest.nodes:
        kind = node[0]
        if kind == "array":
            table.append(finish(entries[node[1]], array_of(node[1])))
            continue
        try:
            table.append(BUILDERS[kind](parts, node))
        except SharedTreeError:
            raise
        except Exception as error:
            raise FormatError(
                f"Node {len(table)} of the file, a `{kind}`, cannot be built "
                f"({type(error).__name__}: {printable(str(error)[:200])}). "
                "The file is damaged, or was made by hand."
            ) from error
    return parts.child(manifest.root)


def _maker(entry: TypeEntry, cls: type, renames: Renames) -> Any:
    """For a class with fields, what builds an instance from their values; else the class."""
    if entry.kind in FIELD_KINDS:
        return builder(entry, cls, renames)
    if kind_of(cls) != entry.kind:
        what = "an enum" if entry.kind == "enum" else "a registered pytree node"
        raise StructureMismatchError(
            f"`{entry.name}` was {what} when the file was written, and `{cls.__qualname__}` is none now. Load the file "
            "with the code that wrote it."
        )
    return cls


# --- names ------------------------------------------------------------------------------------------------------------


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
