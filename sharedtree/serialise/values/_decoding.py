"""Manifest and arrays → DAG, node by node.

Children stand before their parents in a manifest, so one pass from first to last builds everything, and nothing
recurses. Names are resolved before anything is built. What is called is: the flatten and unflatten functions, hooks and
default factories of trusted classes, and their hashes where they are keys; never what the file says.
"""

from collections.abc import Callable
from typing import Any

from ..._dag import Dag
from ..._errors import FormatError, SharedTreeError, StructureMismatchError
from ..._printable import printable
from ..arrays._arrays import finish
from ..container._strict_json import malformed
from ..trust._classes import FIELD_KINDS, kind_of
from ..trust._trust import Trust
from ._atoms import DistinctNans, is_nan
from ._evolution import Renames, builder
from ._kinds import BUILDERS, nested_too_deeply, num_keys
from ._name_paths import Resolved, resolve
from ._nodes import Collisions, Manifest, Parts, TypeEntry, most_collisions
from ._touched import first_touched, walked_in


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
    deep = nested_too_deeply(manifest.nodes, walked_in(classes)) if Dag in classes else None
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
