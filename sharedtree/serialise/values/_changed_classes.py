"""Makes instances of classes whose fields may have changed since the file was written.

A field that was added gets its default. A new field without a default is an error with a fix, and so is a field that
was removed, because a guess would lose data. There are three ways to adapt a file:

- `renames=` at the call that loads. The class stays as it is.
- `__sharedtree_names__`, in which a class lists its earlier names.
- `__sharedtree_version__` with `__sharedtree_migrate__`, which turns the fields of an older version into new ones.

A file lists two groups of attributes for each class: `fields`, which the class declared, and `extra`, which only its
instances had. It also lists the `missing` fields: declared, but without a value in these instances.

Libraries treat the attributes of their classes in different ways, which `AttributeRules` describe (`rules`). Some keep
kinds, marks or metadata of all attributes in one entry of each instance. The file has this entry like an attribute.
Neither `renames=` nor a migration sees it, and each attribute keeps its mark. It is an *own entry* of the library
(`rules.own_entries`).
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
`"old.mod:Old.weight"` → `"kernel"`, or None to drop the field. An old name that is not in the file has no effect.
"""


def maker_for(entry: TypeEntry, cls: Any, renames: Renames) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that makes an instance from its values in a file: the `fields`, then the `extra` attributes.

    Args:
        entry: the class as the file describes it. Its kind is one of those with fields, `FIELD_KINDS`.
        cls: the class now.
        renames: the option of `load`.

    Raises:
        StructureMismatchError: if the class has changed, and the user must decide about some field.
        FormatError: if the file sets an attribute forbidden in files.
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
        # `fault_of_attribute` returns None for a name that a file may set. Of the old and the new name, one must be
        # such a name. A dropped attribute (`new` is None) is never set, so it may have any name.
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


def name_after_renames(entry: TypeEntry, cls: Any, renames: Renames, field: str) -> Any:
    """Returns the new name of a field. None if the user drops it, and `field` itself if `renames` has no entry for it.

    An entry may have the name of the class in the file, or its name now.

    Args:
        entry: the class in the file.
        cls: the class now.
        renames: the option of `load`.
        field: name of the field, or another attribute, in the file.
    """
    keys = (f"{entry.name}.{field}", f"{cls.__module__}:{cls.__qualname__}.{field}")
    return next((renames[key] for key in keys if key in renames), field)


class _ClassChange:
    """A class as the file describes it, compared with the class now. Makes instances of the class now.

    Args:
        entry: the class in the file.
        cls: the class now.
        renames: the option of `load`.

    Attributes:
        layout: the layout of the class now. It has the declared fields.
        rules: how the class's library treats attributes.
        new_names: name of an attribute in the file → its name now. None if the user drops it.
        names_of_values: the names now, one for each value in a node, in order. None for a dropped attribute.
        kept_names: `names_of_values` without the dropped attributes.
        unset_fields: names now of the fields that had no value when the file was written.
        undeclared: names in the file of `extra` attributes, without names of fields of the class now.
        make_from_pairs: makes an instance from pairs of name and value.

    Raises:
        StructureMismatchError: if `renames` has an unusable new name, or gives two fields one name.
    """

    def __init__(self, entry: TypeEntry, cls: Any, renames: Renames) -> None:
        self.entry, self.cls, self.renames = entry, cls, renames
        self.layout = layout_of(cls)
        self.rules = self.layout.rules
        self.new_names = {name: self.present_name(name) for name in (*entry.fields, *entry.extra)}
        # `fields` and then `extra`: the order of the values in a node.
        self.names_of_values = list(self.new_names.values())
        self.kept_names = [name for name in self.names_of_values if name is not None]
        self.unset_fields = {self.present_name(name) for name in entry.missing}
        if len(set(self.kept_names)) != len(self.kept_names):
            raise StructureMismatchError(
                f"After renaming, two fields of `{entry.name}` have one name. Correct `renames=`."
            )
        self.undeclared = self._find_undeclared()
        self.make_from_pairs = maker_from_pairs(cls, self.new_names, self.renames)

    def maker_from_values(self) -> Callable[[Sequence[Any]], Any]:
        """Returns a function that makes an instance from the values of one node.

        The function migrates the values, or adds defaults for new fields, or does neither if the class has not changed.

        Raises:
            StructureMismatchError: if the class has no migration for the file's version, lacks a field of the file, or
                has a new field without a default.
        """
        make_from_pairs, kept_names, version = self.make_from_pairs, self.kept_names, self.entry.version
        migrate = getattr(self.cls, "__sharedtree_migrate__", None)
        # Fields of the file that the class does not have, and new fields of the class.
        unknown = [name for name in kept_names if name not in self.layout.fields and name not in self.undeclared]
        added = self.fields_to_default(kept_names)
        # A class without a version can have a migration, too. It is called if the fields of file and class differ.
        if version != self.layout.version or (migrate is not None and (unknown or added)):
            self._require_migration(migrate)
            return lambda values: self._migrate(migrate, self.attributes_from(values))
        if unknown:
            raise self.removed_fields_error(unknown)
        # Name of a new field → function that makes its default.
        defaults = {name: self.require_default(name) for name in added}
        # The usual case: the class has not changed.
        if not defaults and len(kept_names) == len(self.names_of_values):
            return lambda values: make_from_pairs(zip(kept_names, values, strict=True))

        def make_with_defaults(values: Sequence[Any]) -> Any:
            attributes = self.attributes_from(values)
            return make_from_pairs(
                {**attributes, **{name: new_default() for name, new_default in defaults.items()}}.items()
            )

        return make_with_defaults

    def attributes_from(self, values: Sequence[Any]) -> dict[str, Any]:
        """Returns the attributes of one node as a dict: name now → value. Dropped attributes are absent."""
        return {name: value for name, value in zip(self.names_of_values, values, strict=True) if name is not None}

    def fields_to_default(self, present: Collection[str]) -> list[str]:
        """Returns the fields of the class that need a default.

        A field needs none if it is in `present`, if it was unset when the file was written, or if the rules of its
        library let it stay unset.

        Args:
            present: names of attributes with a value.
        """
        absent = [name for name in self.layout.fields if name not in present and name not in self.unset_fields]
        return [name for name in absent if not self.rules.may_stay_unset(self.cls, name)]

    def present_name(self, field: str) -> str | None:
        """Returns the name that an attribute in the file has now, after `renames`. None if the user drops it.

        Raises:
            StructureMismatchError: if the new name is no identifier, or if the old or the new name is an own entry of
                the library: see the head of this file.
        """
        new = name_after_renames(self.entry, self.cls, self.renames, field)
        # `renames` has no entry for it. An entry is checked below, even if it gives the same name again.
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

    def _find_undeclared(self) -> set[str]:
        """Returns the names of `extra` attributes in the file, without those that are fields of the class now.

        Raises:
            StructureMismatchError: if `renames` gives an `extra` attribute a new name that is no field.
        """
        extra = set(self.entry.extra) - set(self.layout.fields)
        # An `extra` attribute may keep its name, be dropped, or become a field, but not get another undeclared name.
        renamed = [name for name in self.entry.extra if self.new_names[name] not in (name, None, *self.layout.fields)]
        if renamed:
            old, new = renamed[0], self.new_names[renamed[0]]
            raise StructureMismatchError(
                f"`renames` gives the attribute `{printable(old)}` of `{self.entry.name}` the name `{new}`, and the "
                "class declares neither. Only fields are renamed. Let the class say what became of it:\n"
                "    __sharedtree_version__ = 1\n\n"
                "    @classmethod\n"
                "    def __sharedtree_migrate__(cls, fields: dict, version: int) -> dict:\n"
                "        # change `fields` here, for example: fields['new_name'] = fields.pop('old_name')\n"
                "        return fields"
            )
        return extra

    def require_default(self, name: str) -> Callable[[], Any]:
        """Returns a function that makes the default of a field.

        Raises:
            StructureMismatchError: if the field has no default. The error has a fix.
        """
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
        """Returns the error for fields of the file unknown to the class.

        Args:
            unknown: names of these fields.
        """
        listed = ", ".join(f"`{printable(name)}`" for name in unknown)
        fact = f"The file has fields of `{self.entry.name}` that `{self.cls.__qualname__}` does not have: {listed}."
        library = library_of(root_of(self.cls.__module__))
        if library is not None:
            fact += (
                f" The file was written with another version of {library.name} than {library.version}, which is "
                f"installed. Update {library.name}, if there is a newer one:\n{update_command(library.name)}"
            )
        renamed: dict[str, str | None] = {f"{self.entry.name}.{name}": "new_name" for name in unknown}
        dropped: dict[str, str | None] = {f"{self.entry.name}.{name}": None for name in unknown}
        return StructureMismatchError(
            f"{fact}\nIf a field was renamed, give `sharedtree.load` its new name:\n"
            f"    renames={{{renames_as_code(self.renames, renamed)}}}\n"
            "If it was removed, None drops its saved value:\n"
            f"    renames={{{renames_as_code(self.renames, dropped)}}}"
        )

    def _require_migration(self, migrate: Any) -> None:
        """Checks that the class can migrate the fields of the file.

        Args:
            migrate: `__sharedtree_migrate__` of the class. None if it has none.

        Raises:
            StructureMismatchError: if the file's version is newer than the class's, or the class has no migration.
        """
        versions = (
            f"The file has version {self.entry.version} of `{self.entry.name}`, and the class here has version "
            f"{self.layout.version}"
        )
        if self.entry.version > self.layout.version:
            raise StructureMismatchError(f"{versions}. Load it with the newer code, or with the class of that version.")
        if migrate is None:
            raise StructureMismatchError(
                f"{versions}, but no method that converts the old fields. Add one to the class:\n"
                "    @classmethod\n"
                "    def __sharedtree_migrate__(cls, fields: dict, version: int) -> dict:\n"
                "        # change `fields` here, for example: fields['new_name'] = fields.pop('old_name')\n"
                "        return fields"
            )

    def _may_be_set(self, name: Any) -> bool:
        """Returns True if a migration may return an attribute of this name.

        It may return fields, and undeclared attributes that the file has. If the classes of the library declare no
        attributes (`rules.is_open`), it may return all that a file may set. It may not return own entries.
        """
        if name in self.layout.fields:
            return True
        is_possible = name in self.undeclared or (self.rules.is_open and fault_of_attribute(self.cls, name) is None)
        return is_possible and name not in self.rules.own_entries

    def _migrate(self, migrate: Any, fields: dict[str, Any]) -> Any:
        """Makes an instance from the fields of another version, by the migration of the class.

        Args:
            migrate: `__sharedtree_migrate__` of the class.
            fields: name now → value, for all attributes kept. This method removes the library's own
                entries from the dict.

        Raises:
            StructureMismatchError: if the migration raises, or returns an unknown field, a declaration
                (`dataclasses.Field`) instead of a value, or no value for a field without a default.
        """
        rules, version = self.rules, self.entry.version
        hook = f"`{self.cls.__qualname__}.__sharedtree_migrate__`"
        # A migration does not see the entries in which a library keeps marks of all attributes.
        held_back = {name: fields.pop(name) for name in rules.own_entries if name in fields}
        try:
            migrated: dict[Any, Any] = dict(migrate(dict(fields), version))
        except Exception as error:  # noqa: BLE001 -- a hook may raise anything
            # `from None`, since its text may quote the file, and a traceback would show it as it is.
            raise StructureMismatchError(
                f"{hook} raised {type(error).__name__} on the fields of version {version}: {printable(str(error))}"
            ) from None
        declared = next((name for name, value in migrated.items() if isinstance(value, dataclasses.Field)), None)
        if declared is not None:
            raise StructureMismatchError(
                f"{hook} returned a declaration as `{printable(str(declared))}`, as `nnx.data` and `nnx.static` make "
                "them. Return the value: a name keeps the mark that it has in the file, the mark of a new one follows "
                "from the value, and what `renames=` renames keeps its mark."
            )
        # If all names that may not be set are fields of the file, the migration passed these on. Otherwise it made one
        # up.
        unknown = [name for name in migrated if not self._may_be_set(name)]
        if unknown and all(name in fields for name in unknown):
            raise self.removed_fields_error(unknown)
        if unknown:
            listed = ", ".join(f"`{printable(str(name))}`" for name in unknown)
            raise StructureMismatchError(
                f"{hook} returned what `{self.cls.__qualname__}` has no field for, or has for something else: "
                f"{listed}. Return the fields of version {self.layout.version}."
            )
        migrated |= {name: self.require_default(name)() for name in self.fields_to_default(migrated)}
        # Some libraries work out the marks of attributes when these are assigned. So an instance with the old
        # attributes and marks is made first, and then the new attributes are assigned.
        if rules.is_assigned:
            obj = self.make_from_pairs((fields | held_back).items())
            rules.reassign(obj, migrated)
            return obj
        # Other libraries get their own entries back. If an own entry is a dict from the names of attributes to marks,
        # it must have no marks of attributes that the migration removed. The dict has the names in the file (`old`).
        removed = {old for old, new in self.new_names.items() if new in fields and new not in migrated}
        for name, marks in held_back.items():
            is_by_name = type(marks) is dict
            migrated[name] = {old: mark for old, mark in marks.items() if old not in removed} if is_by_name else marks
        return self.make_from_pairs(migrated.items())


def complete_renames(manifest: Manifest, renames: Renames) -> Renames:
    """Returns the renames, with an additional entry for each old name in `__main__`.

    A class or function with such a name was defined by the program that wrote the file. In the file, its module is
    `manifest.main`, the name by which other programs import that program. So the added entry has this module name:

        {"__main__:Net": "net:Net"}    →    {"train:Net": "net:Net", "__main__:Net": "net:Net"}    (`train.py` wrote it)
    """
    if manifest.main is None:
        return renames
    pairs = [(old.partition(":"), new) for old, new in renames.items()]
    # `CHILD` is the name that `__main__` has in processes of `multiprocessing`.
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
                f"`renames` has the old name {old!r}, which no file can have. Write the module, a colon, and the name "
                "of the class, the function or the field:\n"
                '    renames={"old.module:Old.weight": "kernel"}'
            )
        if new is not None and not isinstance(new, str) and not callable(new):
            raise TypeError(
                f"`renames` gives `{old}` the new name {new!r}, which is no name. Give a text, a class, a function, or "
                'None to drop a field:\n    renames={"old.module:Old": "new.module:New"}'
            )
