"""Makes instances of classes whose fields may have changed since the file was written.

A field that was added gets its default. A new field without a default is an error with a fix, and so is a field that
was removed, because a guess would lose data. There are three ways to adapt a file:

- `renames=` at the call that loads. The class stays as it is.
- `__sharedtree_names__`, in which a class lists its earlier names.
- `__sharedtree_version__` with `__sharedtree_migrate__`, which turns the fields of an older version into new ones.

Some libraries keep kinds, marks or metadata of all attributes in one entry of each instance. The file has this entry
like an attribute. Neither `renames=` nor a migration sees it, and each attribute keeps its mark. The code calls it an
own entry of the library (`own_entries`).

A file lists two groups of attributes for each class: `fields`, which the class declared, and `extra`, which only its
instances had.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...core._errors import FormatError, StructureMismatchError
from ...core._printing import printable
from ..trust._buildable_classes import FIELD_KINDS, kind_of
from ..trust._public_names import CHILD, MAIN, is_well_formed, library_of, root_of
from ..trust._resolved_names import renames_as_code, update_command
from ._instances import fault_of_attribute, layout_of, maker_from_pairs
from ._nodes import Manifest, TypeEntry

Renames = Mapping[str, str | type | Callable[..., Any] | None]
"""Old name → new name.

For a class or a function: `"old.mod:Old"` → `"new.mod:New"`, or the new class itself. For a field:
`"old.mod:Old.weight"` → `"kernel"`, or None to drop the field. Old names that are not in the file do nothing.
"""


def maker_for(entry: TypeEntry, cls: Any, renames: Renames) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that makes an instance from its values in a file: the `fields`, then the `extra` attributes.

    Raises:
        StructureMismatchError: if the class has changed, and the user must decide about some field.
        FormatError: if the file sets an attribute, but no file may do so.
    """
    if kind_of(cls) not in FIELD_KINDS:
        raise changed_kind_error(entry.name, cls, f"a {entry.kind}")
    if getattr(cls, "__abstractmethods__", None):
        raise StructureMismatchError(
            f"`{cls.__qualname__}` is abstract now and has no instances. Load it with the code that wrote the file."
        )
    change = _ClassChange(entry, cls, renames)
    for name in entry.extra:
        new = change.new_names[name]
        # A file may not set an attribute if both its old and its new name are at fault. A dropped attribute (`new` is
        # None) is never set, so it may have any name.
        fault = fault_of_attribute(cls, name) and new is not None and fault_of_attribute(cls, new)
        if fault:
            key = f"{entry.name}.{printable(name[:80])}"
            raise FormatError(
                f"The file sets the attribute `{printable(name[:80])}` of `{entry.name}`{fault} Load it without that:\n"
                f"    renames={{{renames_as_code(renames, {key: None})}}}"
            )
    return change.maker_from_values()


def changed_kind_error(name: str, cls: Any, kind_in_file: str) -> StructureMismatchError:
    """Returns the error for a class whose instances are rebuilt in another way than when the file was written.

    Args:
        name: name of the class in the file.
        cls: the class now.
        kind_in_file: words for its kind, such as `an enum`.
    """
    fact = f"`{name}` was {kind_in_file} when the file was written, and `{cls.__qualname__}` is none now."
    library = library_of(root_of(cls.__module__))
    if library is None:
        return StructureMismatchError(f"{fact} Load the file with the code that wrote it.")
    installed = f"{library.name} {library.version}"
    return StructureMismatchError(
        f"{fact} Another version of {library.name} wrote it than is installed, {installed}. Update:\n"
        f"{update_command(library.name)}"
    )


def new_name(entry: TypeEntry, cls: Any, renames: Renames, field: str) -> Any:
    """Returns the new name of a field, or the field itself if `renames` has no entry for it.

    An entry may have the name of the class in the file, or its name now.
    """
    keys = (f"{entry.name}.{field}", f"{cls.__module__}:{cls.__qualname__}.{field}")
    return next((renames[key] for key in keys if key in renames), field)


class _ClassChange:
    """A class as the file describes it, compared with the class now. Makes instances of the latter.

    Args:
        entry: the class in the file.
        cls: the class now.
        renames: the option of the call.

    Attributes:
        new_names: name of an attribute in the file → its name now. None if the user drops it.
        names: the new names in the order of the values in a node.
        kept: the names that are not dropped.
        missing: new names of fields that were unset when the file was written.
        extra: `extra` attributes of the file's entry that are no fields of the class now.
        make_from_pairs: makes an instance from pairs of name and value.
    """

    def __init__(self, entry: TypeEntry, cls: Any, renames: Renames) -> None:
        self.entry, self.cls, self.renames = entry, cls, renames
        self.layout = layout_of(cls)
        self.rules = self.layout.rules
        self.new_names = {name: self.renamed(name) for name in (*entry.fields, *entry.extra)}
        self.names = list(self.new_names.values())
        self.kept = [name for name in self.names if name is not None]
        self.missing = {self.renamed(name) for name in entry.missing}
        if len(set(self.kept)) != len(self.kept):
            raise StructureMismatchError(
                f"After renaming, two fields of `{entry.name}` have one name. Correct `renames=`."
            )
        self.extra = self._extra_names()
        self.make_from_pairs = maker_from_pairs(cls, self.new_names, self.renames)

    def maker_from_values(self) -> Callable[[Sequence[Any]], Any]:
        """Returns a function that makes an instance from the values in a node.

        The function migrates the values, or adds defaults, or does neither if the class has not changed.

        Raises:
            StructureMismatchError: if the class has no migration for the file's version, lacks a field of the file, or
                has a new field without a default.
        """
        make_from_pairs, kept, version = self.make_from_pairs, self.kept, self.entry.version
        migrate = getattr(self.cls, "__sharedtree_migrate__", None)
        unknown = [name for name in kept if name not in self.layout.fields and name not in self.extra]
        added = self.absent_fields(kept)
        # A class can migrate fields without a version: then a difference of the fields asks for it.
        if version != self.layout.version or (migrate is not None and (unknown or added)):
            self._require_migration(migrate)
            return lambda values: self._migrate(migrate, self.by_name(values))
        if unknown:
            raise self.removed_fields_error(unknown)
        defaults = {name: self.default_of(name) for name in added}
        # The usual case: the class has not changed.
        if not defaults and len(kept) == len(self.names):
            return lambda values: make_from_pairs(zip(kept, values, strict=True))

        def make_with_defaults(values: Sequence[Any]) -> Any:
            attributes = self.by_name(values)
            return make_from_pairs(
                {**attributes, **{name: new_default() for name, new_default in defaults.items()}}.items()
            )

        return make_with_defaults

    def by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        """Returns a dict of the values in a node, by the names that their attributes have now, without dropped ones."""
        return {name: value for name, value in zip(self.names, values, strict=True) if name is not None}

    def absent_fields(self, present: Collection[str]) -> list[str]:
        """Returns the fields of the class that need a default.

        These are not in `present`, were not unset in the file's instances, and may not stay unset.
        """
        absent = [name for name in self.layout.fields if name not in present and name not in self.missing]
        return [name for name in absent if not self.rules.may_stay_unset(self.cls, name)]

    def renamed(self, field: str) -> str | None:
        """Returns the name that an attribute in the file has now, after `renames`. None if the user drops it.

        Raises:
            StructureMismatchError: if the new name is no name, or if the old or the new one is an own entry of the
                library.
        """
        new = new_name(self.entry, self.cls, self.renames, field)
        if new is field:
            return field
        key = f"{self.entry.name}.{field}"
        if new is not None and (not isinstance(new, str) or not new.isidentifier()):
            raise StructureMismatchError(
                f"`renames` gives the field `{key}` the name `{new!r}`, which names no field. Give its new name, or "
                "None to drop it."
            )
        if not self.rules.own_entries.isdisjoint({field, new}):
            raise StructureMismatchError(
                f"`renames` gives `{key}` the name `{new}`, but one of these is no attribute: in it are kept the kinds "
                "or marks of all attributes. Leave it out: they follow the attributes that are renamed."
            )
        return new

    def _extra_names(self) -> set[str]:
        """Returns the `extra` names of the file's entry that are no fields of the class now.

        Raises:
            StructureMismatchError: if `renames` gives an `extra` attribute a new name that is no field.
        """
        extra = set(self.entry.extra) - set(self.layout.fields)
        renamed = [name for name in self.entry.extra if self.new_names[name] not in (name, None, *self.layout.fields)]
        if renamed:
            old, new = renamed[0], self.new_names[renamed[0]]
            raise StructureMismatchError(
                f"`renames` gives the attribute `{printable(old)}` of `{self.entry.name}` the name `{new}`, and the "
                "class declares neither. Only fields are renamed. Let the class say what became of it:\n"
                "    __sharedtree_version__ = 1\n\n"
                "    @classmethod\n"
                "    def __sharedtree_migrate__(cls, fields: dict, version: int) -> dict:\n"
                "        return fields  # those of that version, made into those of this one"
            )
        return extra

    def default_of(self, name: str) -> Callable[[], Any]:
        """Returns a function that makes the default of a field. Raises with a fix if the field has none."""
        default = self.rules.default_of(self.cls, name)
        if default is not None:
            return default
        fact = (
            f"`{self.cls.__qualname__}` has the field `{name}`, which `{self.entry.name}` did not have when the file "
            "was written, and which has no default."
        )
        renamed = renames_as_code(self.renames, {f"{self.entry.name}.<its old name>": name})
        library = library_of(root_of(self.cls.__module__))
        if library is not None:
            fix = (
                f"An older version of {library.name} wrote the file than is installed. Install one of those:\n"
                f"    pip install '{library.name}<{library.version}'"
            )
        else:
            fix = f"Give it one:\n    {name}: ... = ..."
        raise StructureMismatchError(f"{fact} {fix}\nor, if a field of the file is meant: renames={{{renamed}}}")

    def removed_fields_error(self, unknown: list[str]) -> StructureMismatchError:
        """Returns the error for fields of the file that the class does not have."""
        listed = ", ".join(f"`{printable(name)}`" for name in unknown)
        fact = f"The file has fields of `{self.entry.name}` that `{self.cls.__qualname__}` does not have: {listed}."
        library = library_of(root_of(self.cls.__module__))
        if library is not None:
            fact += (
                f" Another version of {library.name} wrote the file than is installed, {library.version}. Update:\n"
                f"{update_command(library.name)}\nOr, if it is the newest, say"
            )
        else:
            fact += " Say"
        dropped: dict[str, str | None] = {f"{self.entry.name}.{name}": None for name in unknown}
        return StructureMismatchError(
            f"{fact} what became of them, a new name, or None to drop them:\n"
            f"    renames={{{renames_as_code(self.renames, dropped)}}}"
        )

    def _require_migration(self, migrate: Any) -> None:
        """Raises if the class cannot migrate the fields: the file's version is newer, or the class has no migration.

        Args:
            migrate: `__sharedtree_migrate__` of the class. None if it has none.
        """
        versions = (
            f"The file has version {self.entry.version} of `{self.entry.name}`, and the class here has version "
            f"{self.layout.version}"
        )
        if self.entry.version > self.layout.version:
            raise StructureMismatchError(f"{versions}. Load it with the newer code, or with the class of that version.")
        if migrate is None:
            raise StructureMismatchError(
                f"{versions}, but does not say how the fields become those of this version. Add to the class:\n"
                "    @classmethod\n"
                "    def __sharedtree_migrate__(cls, fields: dict, version: int) -> dict:\n"
                "        return fields  # those of that version, made into those of this one"
            )

    def _may_be_set(self, name: Any) -> bool:
        """Returns True if a migration may return an attribute of this name."""
        if name in self.layout.fields:
            return True
        is_possible = name in self.extra or (self.rules.is_open and fault_of_attribute(self.cls, name) is None)
        return is_possible and name not in self.rules.own_entries

    def _migrate(self, migrate: Any, fields: dict[str, Any]) -> Any:
        """Makes an instance from the fields of another version, by the migration of the class.

        Args:
            migrate: `__sharedtree_migrate__` of the class.
            fields: attributes by the names that they have now. The library's own entries are removed from this dict.

        Raises:
            StructureMismatchError: if the migration raises, or returns an unknown field, a declaration instead of a
                value, or no value for a field without a default.
        """
        rules, version = self.rules, self.entry.version
        hook = f"`{self.cls.__qualname__}.__sharedtree_migrate__`"
        # A migration does not see the entries in which a library keeps marks of all attributes.
        held_back = {name: fields.pop(name) for name in rules.own_entries if name in fields}
        try:
            migrated: dict[Any, Any] = dict(migrate(dict(fields), version))
        except Exception as error:
            raise StructureMismatchError(
                f"{hook} raised {type(error).__name__} on the fields of version {version}: {printable(str(error))}"
            ) from error
        declared = next((name for name, value in migrated.items() if isinstance(value, dataclasses.Field)), None)
        if declared is not None:
            raise StructureMismatchError(
                f"{hook} returned a declaration as `{printable(str(declared))}`, as `nnx.data` and `nnx.static` make "
                "them. Return the value: a name keeps the mark that it has in the file, the mark of a new one follows "
                "from the value, and what `renames=` renames keeps its mark."
            )
        unknown = [name for name in migrated if not self._may_be_set(name)]
        # All unknown names are fields of the file that the migration passed on.
        if unknown and all(name in fields for name in unknown):
            raise self.removed_fields_error(unknown)
        if unknown:
            listed = ", ".join(f"`{printable(str(name))}`" for name in unknown)
            raise StructureMismatchError(
                f"{hook} returned what `{self.cls.__qualname__}` has no field for, or has for something else: "
                f"{listed}. Return the fields of version {self.layout.version}."
            )
        migrated |= {name: self.default_of(name)() for name in self.absent_fields(migrated)}
        # Some libraries derive the marks of attributes from assignments, so the old instance is made first.
        if rules.is_assigned:
            obj = self.make_from_pairs((fields | held_back).items())
            rules.reassign(obj, migrated)
            return obj
        # Other libraries get their own entries back. If such an entry is a dict from the names of attributes to marks,
        # it must have no marks of attributes that the migration removed. The marks have the names in the file (`old`).
        removed = {old for old, new in self.new_names.items() if new in fields and new not in migrated}
        for name, marks in held_back.items():
            is_by_name = type(marks) is dict
            migrated[name] = {k: mark for k, mark in marks.items() if k not in removed} if is_by_name else marks
        return self.make_from_pairs(migrated.items())


def renames_in(manifest: Manifest, renames: Renames) -> Renames:
    """Returns the renames, with an additional entry for each old name in `__main__`.

    In the program that wrote the file, such a class or function was in `__main__`. In the file, it is in
    `manifest.main`, the name by which other programs import that program. So the added entry has this module name:

        {"__main__:Net": "net:Net"}    →    {"train:Net": "net:Net", "__main__:Net": "net:Net"}    (`train.py` wrote it)
    """
    if manifest.main is None:
        return renames
    pairs = [(old.partition(":"), new) for old, new in renames.items()]
    of_program = {f"{manifest.main}:{name}": new for (module, _, name), new in pairs if module in (MAIN, CHILD)}
    return {**of_program, **renames}


def require_sound_renames(renames: Renames) -> None:
    """Checks the option `renames`.

    Raises:
        TypeError: if it is no mapping, or a value is neither a text, nor a class or function, nor None.
        ValueError: if a key cannot be a name in a file.
    """
    if not isinstance(renames, Mapping):
        raise TypeError(
            f"`renames` is a `{type(renames).__qualname__}`. Give a dict of old and new names:\n"
            '    renames={"old.module:Old": "new.module:New"}'
        )
    for old, new in renames.items():
        if not isinstance(old, str) or not is_well_formed(old):
            raise ValueError(
                f"`renames` has the old name {old!r}, which can be in no file. Write the module, a colon, and the name "
                'of the class, the function or the field:\n    renames={"old.module:Old.weight": "kernel"}'
            )
        if new is not None and not isinstance(new, str) and not callable(new):
            raise TypeError(
                f"`renames` gives `{old}` the new name {new!r}, which is no name. Give a text, a class, a function, or "
                'None to drop a field:\n    renames={"old.module:Old": "new.module:New"}'
            )
