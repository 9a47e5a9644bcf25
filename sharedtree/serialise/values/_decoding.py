"""Manifest and arrays → DAG: names are resolved, arrays chosen, and nodes built from first to last.

Children stand before their parents in a manifest, so one pass builds everything, and nothing recurses. What is called
is: the flatten and unflatten functions, hooks and default factories of trusted classes, and their hashes where they are
keys; never what the file says. `load` and `orbax.restore` differ in who reads the bytes; the rest is a `Plan`.
"""

import collections
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from ...core._by_identity import IdentityDict, IdentitySet
from ...core._errors import FormatError, SharedTreeError, StructureMismatchError
from ...core._printing import printable
from ...core._structure import FlatDag
from ...tree._dag import Dag
from ..arrays._placing import Place, Placement, Select, Shardings, finish, place_of, require_select, struct_of
from ..container._header import malformed
from ..trust._buildable_classes import FIELD_KINDS, kind_of
from ..trust._resolved_names import (
    Name,
    Paths,
    Request,
    call_without_template,
    judge_all,
    options_beside,
    renames_as_code,
    resolve_all,
)
from ..trust._trusted_names import Trust
from ._all_kinds_of_nodes import (
    BUILDERS,
    MAX_PRINTED,
    TYPED,
    compared_of,
    first_touched,
    key_sizes,
    keys_of,
    nested_too_deeply,
    num_keys,
    steps,
)
from ._changed_classes import Renames, maker_for, new_name, of_another_kind, renames_in, require_sound_renames
from ._encoding import like_in, names_in
from ._kinds_of_values import name_of_method
from ._left_out_values import Key, left_out_of
from ._nodes import Collisions, Manifest, Node, Parts, TypeEntry, most_collisions
from ._paths import first_parents, part_at, path_from
from ._template import Comparison, LoadReport, compare, rebuilt, require_no_differences

_MAX_PATHS = 3
_MAX_TIES, _MAX_LOOKED_AT = 8, 1000
_IN_CODE = re.compile(r"(\.\w+|\[\d+\]|\['\w+'\])+", re.ASCII)
"""A path that can stand in code as it is printed."""

Resolved = Mapping[tuple[str, ...], Any]
"""The object of each name: (`"class"` or `"function"`, name) → object."""


def decode(
    manifest: Manifest,
    array_of: Callable[[int], Any],
    trust: Trust | None = None,
    renames: Renames | None = None,
    resolved: Resolved | None = None,
) -> Any:
    """Builds the DAG that a manifest describes. What is one node in the manifest is one object in it.

    `array_of` gives the array of an entry by its index, as the entry says, of PRNG keys the raw data. It is asked once
    for each, in the order of the nodes. Names are looked up by what may be named, `trust`, if they are not `resolved`.

    Raises:
        UntrustedTypeError: if the file names what it may not. All such names are listed, and nothing was built.
        StructureMismatchError: if a name leads nowhere, a class has changed, or devices are missing.
        FormatError: if the manifest describes what cannot be built.
    """
    renames = {} if renames is None else renames_in(manifest, renames)
    values = {**manifest.atoms, **(resolve(manifest, trust, renames) if resolved is None else resolved)}
    makers = [_maker(entry, values["class", entry.name], renames) for entry in manifest.types]
    fields = [entry.fields for entry in manifest.types]
    classes = [values["class", entry.name] for entry in manifest.types]
    touched = first_touched(manifest.nodes, classes)
    if touched is not None:
        raise FormatError(
            f"Node {touched} of the file, a `{manifest.nodes[touched][0]}`, has an object of Flax NNX, or a `Module`, "
            "where something would look at it while the file is loaded. No save would write that."
        )
    collisions = Collisions(most_collisions(num_keys(manifest.nodes)), key_sizes(manifest.nodes))
    parts = Parts(values, makers, fields, collisions)
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
        except Exception as error:  # noqa: BLE001 -- a constructor may raise anything
            raise FormatError(
                f"Node {len(table)} of the file, a `{kind}`, cannot be built "
                f"({type(error).__name__}: {printable(str(error)[:200])}). "
                "The file is damaged, or was made by hand."
            ) from None
    return parts.child(manifest.root)


def _maker(entry: TypeEntry, cls: type, renames: Renames) -> Any:
    """For a class with fields, what builds an instance from their values; else the class."""
    if entry.kind in FIELD_KINDS:
        return maker_for(entry, cls, renames)
    if kind_of(cls) != entry.kind:
        what = "an enum" if entry.kind == "enum" else "a registered pytree node"
        raise of_another_kind(entry.name, cls, what)
    return cls


# --- what is taken of a file ------------------------------------------------------------------------------------------


class Plan:
    """What is to be read for one call of `load`: the entries that are `wanted`, and the `place` for each.

    Names are looked up, and a template is compared, when it is made: what does not fit is an error before anything is
    read. Options are those of `load`; `label` is what errors call the file. Cost: with a template, a walk over both.
    """

    def __init__(
        self,
        manifest: Manifest,
        label: str,
        trust: Trust,
        *,
        like: Any = None,
        select: Select = None,
        sharding: Shardings = None,
        strict: bool = True,
        renames: Renames | None = None,
    ) -> None:
        require_select(select)
        self._manifest = part_at(manifest, select) if isinstance(select, str) else manifest
        self._resolved = resolve(self._manifest, trust, renames)
        self._renames = renames_in(self._manifest, renames or {})
        self._compared: Comparison | None = None
        self._like = like if not strict else None
        self._template = like
        self.place: Place = place_of(sharding)
        entries = self._manifest.arrays
        lacking = left_out_of(self._manifest)
        if lacking:
            self._resolved = {**self._resolved, **self._put_back(lacking, like, label)}
        if like is not None:
            classes = [self._resolved["class", entry.name] for entry in self._manifest.types]
            deep = nested_too_deeply(self._manifest.nodes, compared_of(classes))
            deep = nested_too_deeply(self._manifest.nodes, keys_of, MAX_PRINTED) if deep is None else deep
            if deep is not None:
                raise malformed(f"node {deep} holds one thing too often to be compared with a template")
            structs = {entry.tensor: struct_of(entry) for entry in entries}
            described = IdentityDict((structs[entry.tensor], entry) for entry in entries)
            self._compared = compare(self._decoded(structs), like, described)
            if strict:
                require_no_differences(self._compared.differences, label, self._how_to_fit)
            else:
                self._require_no_dags(classes, self._compared.template, label)
            if sharding is None:
                places: dict[str, Placement] = {}
                for record, struct in self._compared.fitting.items():
                    if struct in described:
                        leaf = self._compared.template.objects[record]
                        has_place = isinstance(leaf, jax.ShapeDtypeStruct) or getattr(leaf, "committed", False)
                        places.setdefault(described[struct].tensor, leaf.sharding if has_place else None)
                self.place = lambda entry: places.get(entry.tensor)
        self.wanted = [entry for entry in entries if not callable(select) or select(entry.tensor)]

    def _put_back(self, lacking: Sequence[Key], like: Any, label: str) -> Mapping[Key, Any]:
        """What a template has in the places of what was left out. Raises if it has not all of it."""
        found = {} if like is None else like_in(like, self._manifest, self._new_step)
        absent = [atom for atom in lacking if atom not in found]
        if absent:
            where = paths_of_names(self._manifest, absent)
            paths = [path for atom in absent for path in where.get(cast("Name", atom), ())]
            listed = ", ".join([f"`{printable(path)}`" for path in paths[:20]])
            beside = f", renames={{{renames_as_code(self._renames, {})}}}" if self._renames else ""
            fact = (
                "what was left out comes" if like is None else "the template has nothing there: what was left out comes"
            )
            raise StructureMismatchError(
                f"`{label}` was saved without {listed}, and {fact} from a template of the same classes that has it. "
                f"All else comes from the file:\n    model = sharedtree.load(path, like=template{beside})",
                paths,
            )
        return found

    def _new_step(self, node: Node, step: str) -> str | None:
        """What leads to an attribute now that a step in the file leads to; None if it is dropped."""
        if node[0] not in ("object", "wrapper"):
            return step
        entry = self._manifest.types[node[1]]
        cls = self._resolved["class", entry.name]
        new = new_name(entry, cls, self._renames, step[1:])
        return step if new == step[1:] else None if new is None else f".{new}"

    def _require_no_dags(self, classes: Sequence[Any], template: FlatDag, label: str) -> None:
        """Raises if a template is not to be filled: its model and that of a `Dag` would be parted."""
        typed = zip(self._manifest.types, classes, strict=True)
        names: set[Name] = {("class", entry.name) for entry, cls in typed if cls is Dag}
        where = paths_of_names(self._manifest) if names else {}
        paths = [path for name in names for path in where.get(name, ())]
        nodes = [(number, template.node(number)) for number in range(len(template.records))]
        paths += [template.text(number) for number, node in nodes if node is not None and node.type.cls is Dag]
        if paths or names:
            listed = ", ".join([f"`{printable(path)}`" for path in dict.fromkeys(paths)][:20])
            raise StructureMismatchError(
                f"`{label}` or the template has a `Dag`, whose model is one with what is beside it, at {listed}. A "
                "template is not filled with parts of such a file. Load it as it is, or save `dag.tree` instead:\n"
                f"    model = {call_without_template(_names(self._manifest), self._manifest.main, self._renames)}",
                paths,
            )

    def _how_to_fit(self) -> list[str]:
        """What to do about a template that differs from the file, by what differs."""
        assert self._compared is not None
        # What differs otherwise, too, or has no name in code, is not made one by that.
        differing = collections.Counter(difference.path for difference in self._compared.differences)
        differing.subtract(path for _, path, _ in self._compared.ties)
        others = [path for path, count in differing.items() if count > 0]
        calls: dict[tuple[str, bool], list[str]] = {}
        for first, path, are_one in self._compared.ties[:_MAX_LOOKED_AT] if len(others) <= _MAX_LOOKED_AT else ():
            if all(map(_IN_CODE.fullmatch, (first, path))) and not any(
                each.startswith((first, path)) for each in others
            ):
                calls.setdefault((first, are_one), [first] if are_one else []).append(path)
        lines = ["Give the template the ties of the file:"] if calls else []
        for (_, are_one), paths in list(calls.items())[:_MAX_TIES]:
            where = ", ".join([f"m{path}" for path in paths])
            where = f"({where})" if len(paths) > 1 else where
            lines.append(f"    template = sharedtree.{'tie' if are_one else 'untie'}(template, lambda m: {where})")
        if len(calls) > _MAX_TIES:
            lines.append("and likewise the others.")
        lines.append(f"{'Or load' if calls else 'Load'} it as it is, or load what fits and see the rest reported:")
        names, main = _names(self._manifest), self._manifest.main
        lines.append(f"    model = {call_without_template(names, main, self._renames)}")
        beside = options_beside(names, main, self._renames, Trust((), names_in(self._template)))
        return [*lines, f"    model, report = sharedtree.load(path, like=template, strict=False{beside})"]

    def tree(self, arrays: Sequence[Any]) -> Any:
        """The tree, from one array for each of `wanted`; with `strict=False` and a template, the report too.

        Cost: one walk over the nodes. The arrays are not copied.
        """
        read: dict[str, Any] = dict(zip([entry.tensor for entry in self.wanted], arrays, strict=True))
        others = [entry for entry in self._manifest.arrays if entry.tensor not in read]
        tree = self._decoded(read | {entry.tensor: struct_of(entry) for entry in others})
        return tree if self._like is None else _filled(self._like, tree, read, self._compared)

    def _decoded(self, held: Mapping[str, Any]) -> Any:
        """The tree, with given objects for its arrays, which need no finishing."""
        arrays, plain = self._manifest.arrays, self._manifest
        if any(entry.weak or entry.key is not None for entry in arrays):
            plain = plain._replace(arrays=tuple(entry._replace(weak=False, key=None) for entry in arrays))
        return decode(plain, lambda i: held[arrays[i].tensor], renames=self._renames, resolved=self._resolved)


def _filled(like: Any, tree: Any, read: dict[str, Any], before: Any) -> tuple[Any, LoadReport]:
    """The template with what fits of the file, whose arrays that were read are given by name."""
    again = compare(tree, like, IdentityDict())
    template = again.template
    # What was not wanted is still a description of an array.
    found = {n: leaf for n, leaf in again.fitting.items() if not isinstance(leaf, jax.ShapeDtypeStruct)}
    used = IdentitySet()

    def leaf_of(number: int) -> Any:
        leaf = found.get(number, template.objects[number])
        if number in found and isinstance(leaf, jax.Array | np.ndarray):
            # What is one object in the file may be two in the template, and stays two.
            return leaf if used.add(leaf) else leaf.copy()
        return leaf

    result = rebuilt(template, leaf_of)
    loaded = [template.text(number) for number in template.leaf_numbers if number in found]
    kept = [template.text(number) for number in template.leaf_numbers if number not in found]
    unused = [tensor for tensor, array in read.items() if array not in used]
    return result, LoadReport(tuple(loaded), tuple(kept), (*before.differences, *before.values), tuple(unused))


# --- names ------------------------------------------------------------------------------------------------------------


def resolve(manifest: Manifest, trust: Trust | None = None, renames: Renames | None = None) -> Resolved:
    """What the names in a manifest lead to. Arguments and errors are those of `decode`."""
    renames = {} if renames is None else renames
    require_sound_renames(renames)
    renames = renames_in(manifest, renames)
    return resolve_all(_names(manifest), lambda: paths_of_names(manifest), trust or Trust(), renames, manifest.main)


def audit(manifest: Manifest, trust: Trust | None = None) -> tuple[Request, ...]:
    """Each name that a file asks for, without building anything."""
    return judge_all(_names(manifest), paths_of_names(manifest), trust or Trust(), manifest.main)


def _names(manifest: Manifest) -> tuple[Name, ...]:
    return cast("tuple[Name, ...]", manifest.names)


def paths_of_names(manifest: Manifest, others: Sequence[Key] = ()) -> Paths:
    """For each name, and each of some other atoms of two texts, where it stands first; at most three places."""
    parents = first_parents(manifest)
    names = {*manifest.names, *others}
    owners = [entry.name for entry in manifest.types]
    found: dict[Any, tuple[str, ...]] = {}

    def note(kind: str, name: str, number: int, step: str) -> None:
        places = found.get((kind, name), ())
        if len(places) < _MAX_PATHS:
            found[kind, name] = (*places, path_from(parents, number) + step)

    if type(manifest.root) is list:
        note(manifest.root[0], manifest.root[-1], -1, "")
    for number in sorted(parents):
        node = manifest.nodes[number]
        if node[0] in TYPED:
            note("class", manifest.types[node[1]].name, number, "")
        method = name_of_method(owners, manifest.nodes, node)
        if method is not None:
            note("method", method, number, "")
        for child, step in steps(manifest, node):
            if type(child) is list and len(child) == 2 and (child[0], child[1]) in names:
                note(child[0], child[1], number, step)
    return found
