"""Manifest and arrays → DAG, node by node.

Children stand before their parents in a manifest, so one pass from first to last builds everything, and nothing
recurses. Names are resolved before anything is built. What is called is: the flatten and unflatten functions, hooks and
default factories of trusted classes, and their hashes where they are keys; never what the file says.
"""

from collections.abc import Callable
from typing import Any

from ..._errors import FormatError, SharedTreeError, StructureMismatchError, UntrustedTypeError
from ..._printable import printable
from ...compat._importing import importable_name
from ..arrays._arrays import finish
from ..trust._allowed import LIBRARIES, NAMES_ONLY, NNX, STANDARD_LIBRARY
from ..trust._classes import FIELD_KINDS, kind_of
from ..trust._trust import Kind, Trust, Verdict, root_of
from ._asked_names import paths_of_names
from ._atoms import DistinctNans, is_nan
from ._evolution import Renames, builder, require_sound_renames
from ._kinds import BUILDERS, num_keys
from ._nodes import Collisions, Manifest, Parts, TypeEntry, most_collisions
from ._touched import first_touched

Resolved = dict[tuple[str, ...], Any]
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
    touched = first_touched(manifest.nodes, [values["class", entry.name] for entry in manifest.types])
    if touched is not None:
        raise FormatError(
            f"Node {touched} of the file, a `{manifest.nodes[touched][0]}`, has an object of Flax NNX, or a `Module`, "
            "where something would look at it while the file is loaded. No save would write that."
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


def resolve(manifest: Manifest, trust: Trust | None = None, renames: Renames | None = None) -> Resolved:
    """What the names in a manifest lead to. Arguments and errors are those of `decode`."""
    trust, renames = trust or Trust(), renames or {}
    require_sound_renames(renames)
    resolved: Resolved = {}
    refused: list[tuple[str, str, str]] = []
    wanted: list[tuple[str, str, str]] = []
    for kind, name in manifest.names:
        if kind == "method":
            continue
        new = renames.get(name, name)
        if new is not None and not isinstance(new, str):
            if kind == "class" and not isinstance(new, type):
                raise TypeError(f"`renames` gives the class `{name}` the new name {new!r}, which is no class.")
            resolved[kind, name] = new
        elif new is None:
            raise StructureMismatchError(
                f"`renames` drops `{name}`, but only fields can be dropped. Give its new name."
            )
        elif trust.allows(new, _kind(kind)) or trust.knows_former(new):
            wanted.append((kind, name, new))
        else:
            refused.append((kind, name, "not on the allow-list"))
    lost: list[tuple[str, Verdict]] = []
    elsewhere: dict[str, str] = {}  # name → the package that the user has to import
    for kind, name, new in wanted if not refused else ():
        verdict = trust.resolve(new, _kind(kind))
        if not verdict.allowed or verdict.elsewhere:
            refused.append((kind, name, verdict.why))
            elsewhere |= {name: importable_name(root_of(new))} if verdict.elsewhere else {}
        elif not verdict.found:
            lost.append((new, verdict))
        else:
            resolved[kind, name] = verdict.obj
    for kind, name in manifest.names:
        owner = resolved.get(("class", name.rpartition(".")[0]))
        why = trust.refusal_of_method(name, owner) if kind == "method" and owner is not None else ""
        if why:
            refused.append((kind, name, why))
    if refused:
        raise _untrusted(manifest, refused, elsewhere)
    if lost:
        lines = [f"    `{name}`: {printable(verdict.why)}" for name, verdict in lost]
        raise StructureMismatchError(
            "\n".join(
                [
                    "The file names what is not there:",
                    *lines,
                    "Install what is missing. If something was renamed or moved, say how:",
                    f'    renames={{"{lost[0][0]}": "new_module:NewName"}}',
                ]
            )
        )
    return resolved


def _untrusted(
    manifest: Manifest, refused: list[tuple[str, str, str]], elsewhere: dict[str, str]
) -> UntrustedTypeError:
    where = paths_of_names(manifest)
    paths = [(where.get((kind, name)) or ("",))[0] for kind, name, _ in refused]
    lines = [
        f"    `{name}`, a {kind}, at {f'`{printable(path)}`' if path else 'the root'}: {printable(why)}"
        for (kind, name, why), path in zip(refused, paths, strict=True)
    ]
    names = [name for _, name, _ in refused]
    suspicious = STANDARD_LIBRARY - {"__main__"}
    standard = [name for name in names if name.partition(":")[0].partition(".")[0] in suspicious]
    advice: list[str] = []
    if standard:
        advice.append(
            "No model needs names like these; do not load the file unless you wrote it: " + ", ".join(standard)
        )
    if elsewhere:
        advice += ["What is not installed may be anyone's. If it is yours, import it before you load:"]
        advice += [f"    import {package}" for package in dict.fromkeys(elsewhere.values())]
    own = [
        name for name in names if name not in elsewhere and name.partition(":")[0].partition(".")[0] not in suspicious
    ]
    if own:
        of_nnx = {name for kind, name, _ in refused if kind == "class" and name in NNX}
        texts = ['"flax"' if name in of_nnx else name.replace("__main__:", "").replace(":", ".") for name in own]
        listed = ", ".join(dict.fromkeys(texts))
        advice += ["If you trust them, say so:", f"    sharedtree.load(path, trusted=[{listed}])"]
        roots = dict.fromkeys(name.partition(":")[0].partition(".")[0] for name in own)
        if LIBRARIES.isdisjoint(roots) and NAMES_ONLY.isdisjoint(roots):
            packages = ", ".join(f'"{root}"' for root in roots)
            advice.append(f"    sharedtree.load(path, trusted=[{packages}])")
    head = "The file names classes or functions that nobody allowed it to name, and nothing was loaded:"
    if elsewhere.keys() >= set(names):
        head = "The file names classes or functions of packages that are not installed, and nothing was loaded:"
    return UntrustedTypeError("\n".join([head, *lines, *advice]), paths, names)


def _kind(kind: str) -> Kind:
    return kind if kind in ("class", "method") else "function"
