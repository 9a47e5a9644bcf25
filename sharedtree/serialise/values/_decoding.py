"""Decodes a manifest and arrays as a DAG: resolves names, selects arrays, and builds nodes from first to last.

Children stand before their parents in a manifest, so one pass builds everything, and nothing recurses. Of trusted
classes, flatten and unflatten functions, hooks and default factories are called; `__hash__` and `__eq__` of keys and of
auxiliary data; and `__lt__` of keys. Nothing else that a file names is called. `load` and `orbax.restore` read bytes in
different ways and share everything else: `Plan`.

Words:

- A *tensor* is the name of an array in the file. An *entry* of `arrays` describes the array: see `ArrayEntry`.
- A *node* is a list of its kind and its operands. A *child* in it is the number of an earlier node, or an *atom*, a
  value that a manifest writes in place.
- A *type* of the manifest is one class with the attributes that some of its instances have: see `TypeEntry`.
- A *record* is a node or leaf of a template that was packed.
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
    first_beyond_bounds,
    first_with_unsafe_object,
    key_sizes,
    keys_of,
    num_keys,
    steps,
    walked_children_in_comparison,
)
from ._changed_classes import (
    Renames,
    changed_kind_error,
    complete_renames,
    maker_for,
    name_after_renames,
    require_sound_renames,
)
from ._encoding import find_left_out_values, names_in
from ._kinds_of_values import name_of_method
from ._left_out_values import Key, dropped_atoms, left_out_atoms
from ._nodes import Collisions, Manifest, Node, Parts, TypeEntry, most_collisions
from ._paths import first_parents, part_at, path_from
from ._template import Comparison, LoadReport, compare, rebuild, require_no_differences

# Most paths that are listed for one name.
_MAX_PATHS = 3
# Most calls of `tie` and `untie` that an error offers as a fix. With more than `_MAX_DIFFERENCES` differences it offers
# none.
_MAX_TIE_CALLS, _MAX_DIFFERENCES = 8, 1000
_IN_CODE = re.compile(r"(\.\w+|\[\d+\]|\['\w+'\])+", re.ASCII)
"""A path that can follow a variable in code, such as `.blocks[0].weight`."""

Resolved = Mapping[tuple[str, ...], Any]
"""(`"class"` or `"function"`, name) → the object with this name."""


def decode(
    manifest: Manifest,
    array_of: Callable[[int], Any],
    trust: Trust | None = None,
    renames: Renames | None = None,
    resolved: Resolved | None = None,
) -> Any:
    """Builds the DAG that a manifest describes. One node becomes one object.

    Args:
        manifest: a parsed manifest.
        array_of: index of an entry in `arrays` → its array; for PRNG keys, the raw data. It is called once for each
            entry, in the order of the nodes.
        trust: names allowed in the file. Default: only the names that are allowed in every file. Not used with
            `resolved`.
        renames: the option of `load`.
        resolved: the objects of all names, as `resolve` returns them. Default: they are looked up.

    Raises:
        UntrustedTypeError: if some names are not trusted. All of them are listed, and nothing was built.
        StructureMismatchError: if a name leads nowhere, a class has changed, or devices are missing.
        FormatError: if an object cannot be built from its node.
    """
    renames = {} if renames is None else complete_renames(manifest, renames)
    # What an atom or name stands for: its texts, such as ("int", "7") or ("class", "net:Net") → value or object.
    values = {**manifest.atoms, **(resolve(manifest, trust, renames) if resolved is None else resolved)}
    # For each type: a function that makes an instance, the names of the declared fields, and the class.
    makers = [_checked_maker(entry, values["class", entry.name], renames) for entry in manifest.types]
    fields = [entry.fields for entry in manifest.types]
    classes = [values["class", entry.name] for entry in manifest.types]
    unsafe = first_with_unsafe_object(manifest.nodes, classes)
    if unsafe is not None:
        raise FormatError(
            f"Node {unsafe} of the file, a `{manifest.nodes[unsafe][0]}`, has an object of Flax NNX, or a `Module`, "
            "where something would look at it while the file is loaded. No save would write that."
        )
    # Bounds the time that Python takes to compare keys with the same hash.
    collisions = Collisions(most_collisions(num_keys(manifest.nodes)), key_sizes(manifest.nodes))
    parts = Parts(values, makers, fields, collisions)
    # `table` has the object of each node so far, by the number of the node. `BUILDERS` read it through `parts`.
    table, entries = parts.table, manifest.arrays
    for node in manifest.nodes:
        kind = node[0]
        # `finish` makes typed PRNG keys or a weakly typed array, if the entry says so.
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


def _checked_maker(entry: TypeEntry, cls: type, renames: Renames) -> Any:
    """Returns a function that makes an instance from the values of its attributes, in the order of the entry.

    For a registered class or an enum, whose entry lists no fields, returns the class itself.

    Raises:
        StructureMismatchError: if the class does not fit the entry any more.
        FormatError: if the entry has an attribute forbidden in files.
    """
    if entry.kind in FIELD_KINDS:
        return maker_for(entry, cls, renames)
    if kind_of(cls) != entry.kind:
        kind_in_file = "an enum" if entry.kind == "enum" else "a registered pytree node"
        raise changed_kind_error(entry.name, cls, kind_in_file)
    return cls


# --- one call of `load` -----------------------------------------------------------------------------------------------


class Plan:
    """The arrays that one call of `load` reads, and their places. `build_tree` makes the result from them.

    Names are looked up, and a template is compared, when the plan is made. So these errors are raised before any array
    is read. Cost: with a template, a walk over the file's nodes and the template.

    Args:
        manifest: the file's manifest.
        label: name of the file in errors.
        trust: names allowed in the file.
        like, select, sharding, strict, renames: options of `load`.

    Attributes:
        wanted: entries of the arrays to read, in the order in which `build_tree` takes the arrays.
        place: entry → the sharding or device for its array. None for JAX's default.

    Raises:
        TypeError: if `select`, `sharding` or `renames` has a value of a wrong type.
        ValueError: if `renames` has a key that can be no name in a file.
        UntrustedTypeError: if some names are not trusted.
        StructureMismatchError: if nothing is at the selected path, a name leads nowhere, or a class has changed. With a
            template, also if it differs (`strict`), or if it or the file has a `Dag` (not `strict`). Also if no
            template has the values left out of the file.
        FormatError: if the file is malformed, or has keys that would take too long to compare with a template.
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
        # `resolve` checks the user's `renames`, so it gets them as they are.
        self._resolved = resolve(self._manifest, trust, renames)
        self._renames = complete_renames(self._manifest, renames or {})
        self._comparison: Comparison | None = None
        # With `strict`, the template is only compared, and the result is the file's tree. Without `strict`, a copy of
        # the template is filled with the arrays of the file that fit.
        self._template_to_fill = like if not strict else None
        self._template = like
        self.place: Place = place_of(sharding)
        entries = self._manifest.arrays
        # Values that were left out of the file are taken from the template.
        left_out = left_out_atoms(self._manifest)
        if left_out:
            self._resolved = {**self._resolved, **self._find_template_values(left_out, like, label)}
        if like is not None:
            classes = [self._resolved["class", entry.name] for entry in self._manifest.types]
            # The comparison also hashes the models of `Dag`s and prints keys, so nodes are checked again, with bounds
            # for that. `number` is that of the first node beyond the bounds.
            number = first_beyond_bounds(self._manifest.nodes, walked_children_in_comparison(classes))
            number = first_beyond_bounds(self._manifest.nodes, keys_of, MAX_PRINTED) if number is None else number
            if number is not None:
                raise malformed(f"node {number} holds one thing too often to be compared with a template")
            # No array is read yet, so the file's tree is built with a `ShapeDtypeStruct` in the place of each.
            structs = {entry.tensor: struct_of(entry) for entry in entries}
            entry_of = IdentityDict((structs[entry.tensor], entry) for entry in entries)
            self._comparison = compare(self._decode_with(structs), like, entry_of)
            if strict:
                require_no_differences(self._comparison.differences, label, self._lines_of_fix)
            else:
                self._require_no_dags(classes, self._comparison.template, label)
            # Without `sharding=`, an array goes where the template's array is, if the user chose that place. They did
            # if JAX calls the array committed, or if it is a `ShapeDtypeStruct`. Any other array goes to JAX's default.
            # If an array fits at several paths, the first decides.
            if sharding is None:
                # Tensor → place.
                places: dict[str, Placement] = {}
                for template_record, file_leaf in self._comparison.fitting_leaves.items():
                    # Other leaves of the file are no arrays.
                    if file_leaf in entry_of:
                        leaf = self._comparison.template.objects[template_record]
                        has_place = isinstance(leaf, jax.ShapeDtypeStruct) or getattr(leaf, "committed", False)
                        places.setdefault(entry_of[file_leaf].tensor, leaf.sharding if has_place else None)
                self.place = lambda entry: places.get(entry.tensor)
        # If `select` is a path, the manifest was cut to its part above. A function chooses arrays by their names.
        self.wanted = [entry for entry in entries if not callable(select) or select(entry.tensor)]

    def _find_template_values(self, left_out: Sequence[Key], like: Any, label: str) -> Mapping[Key, Any]:
        """Finds in a template the values left out of the file. Returns a dict: atom → value.

        For a value in or below a dropped attribute, it is None, and no template is needed.

        Args:
            left_out: the atoms in the places of these values in the file, such as ("left_out", "0").
            like: the template. None if there is none.
            label: name of the file in errors.

        Raises:
            StructureMismatchError: if there is no template, or it has nothing at the path of some atom. The error lists
                at most 20 paths.
        """
        values: dict[Key, Any] = dict.fromkeys(dropped_atoms(self._manifest, self._step_after_renames))
        if like is not None:
            values |= find_left_out_values(like, self._manifest, self._step_after_renames)
        absent = [atom for atom in left_out if atom not in values]
        if absent:
            # Atoms and names are both pairs of texts, so one function finds the paths of either.
            paths_by_atom = paths_of_names(self._manifest, absent)
            paths = [path for atom in absent for path in paths_by_atom.get(cast("Name", atom), ())]
            listed = ", ".join([f"`{printable(path)}`" for path in paths[:20]])
            option = f", renames={{{renames_as_code(self._renames, {})}}}" if self._renames else ""
            # The middle of the sentence below, without a template and with one.
            fact = "which must come" if like is None else "and the template has nothing there. This must come"
            raise StructureMismatchError(
                f"`{label}` was saved without {listed}, {fact} from a template of the same classes. Everything else "
                f"comes from the file:\n    model = sharedtree.load(path, like=template{option})",
                paths,
            )
        return values

    def _step_after_renames(self, node: Node, step: str) -> str | None:
        """Returns the step of a child after `renames`. None if the user drops the attribute.

        Args:
            node: the node in the file.
            step: the step of the child in the file, such as `.weight`. It can change only if it is an attribute of an
                instance.
        """
        if node[0] not in ("object", "wrapper"):
            return step
        entry = self._manifest.types[node[1]]
        cls = self._resolved["class", entry.name]
        # ".weight" → "weight". An attribute that is not renamed keeps its step, which may also be "[0]".
        new = name_after_renames(entry, cls, self._renames, step[1:])
        return step if new == step[1:] else None if new is None else f".{new}"

    def _require_no_dags(self, classes: Sequence[Any], template: FlatDag, label: str) -> None:
        """Raises `StructureMismatchError` if the file or the template has a `Dag`. Called for `strict=False`.

        A template with a `Dag` cannot be filled with the parts of a file that fit. A `Dag` shares objects with the tree
        around it, and leaves that were replaced in that tree would remain in the `Dag`.

        Args:
            classes: the class of each type of the manifest.
            template: the template, packed.
            label: name of the file in errors.
        """
        entries = zip(self._manifest.types, classes, strict=True)
        # The names that the file has for the class `Dag`.
        names: set[Name] = {("class", entry.name) for entry, cls in entries if cls is Dag}
        # Paths in the file, then paths in the template.
        paths_by_name = paths_of_names(self._manifest) if names else {}
        paths = [path for name in names for path in paths_by_name.get(name, ())]
        nodes = [(number, template.node(number)) for number in range(len(template.records))]
        paths += [template.text(number) for number, node in nodes if node is not None and node.type.cls is Dag]
        if paths or names:
            listed = ", ".join([f"`{printable(path)}`" for path in dict.fromkeys(paths)][:20])
            raise StructureMismatchError(
                f"`{label}` or the template has a `Dag`, at {listed}, whose model may share objects with the rest. "
                "Such a template cannot be filled. Load the file as it is, or save `dag.tree` instead:\n"
                f"    model = {call_without_template(_names(self._manifest), self._manifest.main, self._renames)}",
                paths,
            )

    def _lines_of_fix(self) -> list[str]:
        """Returns the last lines of the error for a template that differs from the file: up to three ways to go on.

        The first are calls that tie and untie objects of the template, at paths without other differences. The second
        is a call that loads the file without the template. The third loads the arrays that fit (`strict=False`).
        """
        assert self._comparison is not None
        # Paths with a difference that is not about a tie. A path can also have both sorts: two differences, one of them
        # about a tie. Tying does not help there.
        counts = collections.Counter(difference.path for difference in self._comparison.differences)
        counts.subtract(tie.path for tie in self._comparison.tie_differences)
        other_paths = [path for path, count in counts.items() if count > 0]
        # Ties with the same first path go into one call: (first path, True for `tie`, False for `untie`) → paths in the
        # call. `tie` gets all paths of the object, and `untie` those that get an object of their own.
        calls: dict[tuple[str, bool], list[str]] = {}
        ties = self._comparison.tie_differences[:_MAX_DIFFERENCES] if len(other_paths) <= _MAX_DIFFERENCES else ()
        for first, path, is_tied_in_file in ties:
            # A call is offered only if both paths can be written as code, and no other difference is at or below them.
            below = (f"{first}.", f"{first}[", f"{path}.", f"{path}[")
            if all(map(_IN_CODE.fullmatch, (first, path))) and not any(
                other_path in (first, path) or other_path.startswith(below) for other_path in other_paths
            ):
                calls.setdefault((first, is_tied_in_file), [first] if is_tied_in_file else []).append(path)
        lines = ["Give the template the ties of the file:"] if calls else []
        for (_, is_tied_in_file), paths in list(calls.items())[:_MAX_TIE_CALLS]:
            code = ", ".join([f"m{path}" for path in paths])
            code = f"({code})" if len(paths) > 1 else code
            function = "tie" if is_tied_in_file else "untie"
            lines.append(f"    template = sharedtree.{function}(template, lambda m: {code})")
        if len(calls) > _MAX_TIE_CALLS:
            lines.append("and the others in the same way.")
        lines.append(
            f"{'Or load' if calls else 'Load'} it as it is, or load the parts that fit, with a report of the others:"
        )
        names, main = _names(self._manifest), self._manifest.main
        lines.append(f"    model = {call_without_template(names, main, self._renames)}")
        options = options_beside(names, main, self._renames, Trust((), names_in(self._template)))
        return [*lines, f"    model, report = sharedtree.load(path, like=template, strict=False{options})"]

    def build_tree(self, arrays: Sequence[Any]) -> Any:
        """Builds the tree. With `strict=False` and a template, returns a pair of the filled template and a report.

        An array that is not wanted is a `ShapeDtypeStruct` in the tree.

        Args:
            arrays: one array for each entry of `wanted`. They are not copied.

        Raises:
            ValueError: if `arrays` is shorter or longer than `wanted`.
            StructureMismatchError, FormatError: as `decode` does.

        Cost: one walk over the nodes.
        """
        arrays_read: dict[str, Any] = dict(zip([entry.tensor for entry in self.wanted], arrays, strict=True))
        unread = [entry for entry in self._manifest.arrays if entry.tensor not in arrays_read]
        tree = self._decode_with(arrays_read | {entry.tensor: struct_of(entry) for entry in unread})
        if self._template_to_fill is None:
            return tree
        return _fill_template(self._template_to_fill, tree, arrays_read, self._comparison)

    def _decode_with(self, array_objects: Mapping[str, Any]) -> Any:
        """Builds the tree from finished arrays, or from a `ShapeDtypeStruct` for each.

        Args:
            array_objects: tensor → the array or `ShapeDtypeStruct`. It is weakly typed, or PRNG keys, if its entry says
                so.
        """
        entries, manifest = self._manifest.arrays, self._manifest
        # `decode` would finish each array: it makes an array weakly typed or PRNG keys if the entry says so. The
        # objects are finished already, so they get entries that say neither.
        if any(entry.weak or entry.key is not None for entry in entries):
            manifest = manifest._replace(arrays=tuple(entry._replace(weak=False, key=None) for entry in entries))
        return decode(
            manifest, lambda i: array_objects[entries[i].tensor], renames=self._renames, resolved=self._resolved
        )


def _fill_template(like: Any, tree: Any, arrays_read: dict[str, Any], first_comparison: Any) -> tuple[Any, LoadReport]:
    """Returns a copy of the template with the leaves of the file that fit, and a report.

    Args:
        like: the template.
        tree: the file's tree. Arrays that were not read are `ShapeDtypeStruct`s.
        arrays_read: tensor → array.
        first_comparison: the comparison that the plan made before any array was read. The report has its differences,
            because only it knows of every array whether it is JAX's or NumPy's. It read that from the entries.
    """
    # The first comparison found `ShapeDtypeStruct`s that fit. A second one finds the arrays. Arrays that were not read
    # are structs even now, and the template keeps its own.
    comparison = compare(tree, like, IdentityDict())
    template = comparison.template
    fitting = dict(comparison.fitting_leaves)
    for number, leaf in comparison.fitting_leaves.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            del fitting[number]
    # Arrays of the file that have a place in the result.
    used = IdentitySet()

    def leaf_of(number: int) -> Any:
        """Returns the leaf for a record of the template: the file's if one fits, or else the template's own."""
        leaf = fitting.get(number, template.objects[number])
        if number in fitting and isinstance(leaf, jax.Array | np.ndarray):
            # One array of the file may fit two arrays of the template, which stay two objects. `add` returns False if
            # the leaf was used before.
            return leaf if used.add(leaf) else leaf.copy()
        return leaf

    result = rebuild(template, leaf_of)
    loaded = [template.text(number) for number in template.leaf_numbers if number in fitting]
    kept = [template.text(number) for number in template.leaf_numbers if number not in fitting]
    unused = [tensor for tensor, array in arrays_read.items() if array not in used]
    differences = (*first_comparison.differences, *first_comparison.tolerated)
    return result, LoadReport(tuple(loaded), tuple(kept), differences, tuple(unused))


# --- names ------------------------------------------------------------------------------------------------------------


def resolve(manifest: Manifest, trust: Trust | None = None, renames: Renames | None = None) -> Resolved:
    """Looks up the names in a manifest. Returns a dict: (use, name), such as ("class", "net:Net") → class or function.

    Args:
        manifest: a parsed manifest.
        trust: names allowed in the file. Default: only the names that are allowed in every file.
        renames: the option of `load`.

    Raises:
        UntrustedTypeError: if some names are not trusted. All of them are listed.
        StructureMismatchError: if some names lead nowhere. All of them are listed.
        TypeError, ValueError: if `renames` is unsound: see `require_sound_renames`.
    """
    renames = {} if renames is None else renames
    require_sound_renames(renames)
    renames = complete_renames(manifest, renames)
    return resolve_all(_names(manifest), lambda: paths_of_names(manifest), trust or Trust(), renames, manifest.main)


def audit(manifest: Manifest, trust: Trust | None = None) -> tuple[Request, ...]:
    """Judges each name that a file uses, without building anything. A `Request` says if the name is allowed and found.

    Args:
        manifest: a parsed manifest.
        trust: names allowed in the file. Default: only the names that are allowed in every file.
    """
    return judge_all(_names(manifest), paths_of_names(manifest), trust or Trust(), manifest.main)


def _names(manifest: Manifest) -> tuple[Name, ...]:
    """Returns the names of a manifest. `Name` says that the first text is one of the uses."""
    return cast("tuple[Name, ...]", manifest.names)


def paths_of_names(manifest: Manifest, more_atoms: Sequence[Key] = ()) -> Paths:
    """Returns a dict: (use, name) → the first three paths at which the name is used.

    A name is found in three places: as the class of a node, as the function of a bound method, and as an atom.

    Args:
        manifest: the manifest. Its names are `(use, name)`, such as `("class", "equinox.nn:Linear")`.
        more_atoms: other atoms of two texts, such as `("left_out", "0")`. The dict has their paths, too.
    """
    parents = first_parents(manifest)
    atoms = {*manifest.names, *more_atoms}
    owners = [entry.name for entry in manifest.types]
    paths: dict[Any, tuple[str, ...]] = {}

    def add_path(use: str, name: str, number: int, step: str) -> None:
        """Adds a path to those of a name, unless the name has three already.

        The path is that of the node `number`, followed by `step`.
        """
        listed = paths.get((use, name), ())
        if len(listed) < _MAX_PATHS:
            paths[use, name] = (*listed, path_from(parents, number) + step)

    # The whole tree may be one atom. -1 is no node, so its path is empty.
    if type(manifest.root) is list:
        add_path(manifest.root[0], manifest.root[-1], -1, "")
    # `parents` has the nodes below the root, and the root.
    for number in sorted(parents):
        node = manifest.nodes[number]
        if node[0] in TYPED:
            add_path("class", manifest.types[node[1]].name, number, "")
        method = name_of_method(owners, manifest.nodes, node)
        if method is not None:
            add_path("method", method, number, "")
        for child, step in steps(manifest, node):
            if type(child) is list and len(child) == 2 and (child[0], child[1]) in atoms:
                add_path(child[0], child[1], number, step)
    return paths
