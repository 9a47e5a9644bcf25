"""Instances of classes whose fields may have changed since the file was written.

A field that was added takes its default; one without a default, or one that was removed, is an error that says what to
do, for guessing would lose data. Three things can be done: `renames=` at the call that loads, which needs no change of
the class; `__sharedtree_names__`, in which a class lists the names that it had; and `__sharedtree_version__` with
`__sharedtree_migrate__`, by which a class takes the fields of an older version and returns those of its own.

Where a library keeps kinds, marks or metadata of the attributes in each instance, the file has them as one more entry.
Neither `renames=` nor a migration sees it: what it says of an attribute stays with the attribute.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...core._errors import FormatError, StructureMismatchError
from ...core._printing import printable
from ..trust._buildable_classes import FIELD_KINDS, kind_of
from ..trust._public_names import CHILD, MAIN, is_well_formed, library_of, root_of
from ..trust._resolved_names import renames_as_code, updating
from ._instances import fault_of_attribute, layout_of, maker
from ._nodes import Manifest, TypeEntry

Renames = Mapping[str, str | type | Callable[..., Any] | None]
"""Old name → new name. Of a class or a function: `"old.mod:Old"` → `"new.mod:New"`, or the new one itself. Of a field:
`"old.mod:Old.weight"` → `"kernel"`, or None to drop the field. Old names that are not in the file do nothing."""


def maker_for(entry: TypeEntry, cls: Any, renames: Renames) -> Callable[[Sequence[Any]], Any]:
    """What makes an instance of the values that a file has for the `fields` and `extra` of an entry, in that order."""
    if kind_of(cls) not in FIELD_KINDS:
        raise of_another_kind(entry.name, cls, f"a {entry.kind}")
    if getattr(cls, "__abstractmethods__", None):
        raise StructureMismatchError(
            f"`{cls.__qualname__}` is abstract now and has no instances. Load it with the code that wrote the file."
        )
    change = _Change(entry, cls, renames)
    for name in entry.extra:
        new = change.new_names[name]
        # One that the user drops is not set.
        fault = fault_of_attribute(cls, name) and new is not None and fault_of_attribute(cls, new)
        if fault:
            key = f"{entry.name}.{printable(name[:80])}"
            raise FormatError(
                f"The file sets the attribute `{printable(name[:80])}` of `{entry.name}`{fault} Load it without that:\n"
                f"    renames={{{renames_as_code(renames, {key: None})}}}"
            )
    return change.maker()


def of_another_kind(name: str, cls: Any, was: str) -> StructureMismatchError:
    """The error for a class that is made in another way than when the file was written."""
    fact = f"`{name}` was {was} when the file was written, and `{cls.__qualname__}` is none now."
    library = library_of(root_of(cls.__module__))
    if library is None:
        return StructureMismatchError(f"{fact} Load the file with the code that wrote it.")
    installed = f"{library.name} {library.version}"
    return StructureMismatchError(
        f"{fact} Another version of {library.name} wrote it than is installed, {installed}. Update:\n"
        f"{updating(library.name)}"
    )


def new_name(entry: TypeEntry, cls: Any, renames: Renames, field: str) -> Any:
    """What `renames` calls a field, of the class as it was or as it is; the field itself if it says nothing of it."""
    keys = (f"{entry.name}.{field}", f"{cls.__module__}:{cls.__qualname__}.{field}")
    return next((renames[key] for key in keys if key in renames), field)


class _Change:
    """What a file says of a class, beside the class as it is now."""

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
        self.make = maker(cls, self.new_names, self.renames)

    def maker(self) -> Callable[[Sequence[Any]], Any]:
        make, kept, version = self.make, self.kept, self.entry.version
        migrate = getattr(self.cls, "__sharedtree_migrate__", None)
        unknown = [name for name in kept if name not in self.layout.fields and name not in self.extra]
        added = self.lacking(kept)
        if version != self.layout.version or (migrate is not None and (unknown or added)):
            self._require_migration(migrate)
            return lambda values: self._migrated(migrate, self.by_name(values))
        if unknown:
            raise self.removed(unknown)
        defaults = {name: self.default_of(name) for name in added}
        if not defaults and len(kept) == len(self.names):
            return lambda values: make(zip(kept, values, strict=True))
        return lambda values: make({**self.by_name(values), **{name: new() for name, new in defaults.items()}}.items())

    def by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        """The values by the names that their attributes have now."""
        return {name: value for name, value in zip(self.names, values, strict=True) if name is not None}

    def lacking(self, present: Collection[str]) -> list[str]:
        """The fields that instances must have, that the file did not say to be unset, and that are not present."""
        absent = [name for name in self.layout.fields if name not in present and name not in self.missing]
        return [name for name in absent if not self.rules.may_stay_unset(self.cls, name)]

    def renamed(self, field: str) -> str | None:
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
        """The names of the attributes that no field of the class has. None of them is given another."""
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

    def removed(self, unknown: list[str]) -> StructureMismatchError:
        listed = ", ".join(f"`{printable(name)}`" for name in unknown)
        fact = f"The file has fields of `{self.entry.name}` that `{self.cls.__qualname__}` does not have: {listed}."
        library = library_of(root_of(self.cls.__module__))
        if library is not None:
            fact += (
                f" Another version of {library.name} wrote the file than is installed, {library.version}. Update:\n"
                f"{updating(library.name)}\nOr, if it is the newest, say"
            )
        else:
            fact += " Say"
        gone: dict[str, str | None] = {f"{self.entry.name}.{name}": None for name in unknown}
        return StructureMismatchError(
            f"{fact} what became of them, a new name, or None to drop them:\n"
            f"    renames={{{renames_as_code(self.renames, gone)}}}"
        )

    def _require_migration(self, migrate: Any) -> None:
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
        """Whether a migration may return an attribute of this name."""
        if name in self.layout.fields:
            return True
        is_possible = name in self.extra or (self.rules.is_open and fault_of_attribute(self.cls, name) is None)
        return is_possible and name not in self.rules.own_entries

    def _migrated(self, migrate: Any, fields: dict[str, Any]) -> Any:
        """An instance of what the class makes of the fields of another version."""
        rules, version = self.rules, self.entry.version
        hook = f"`{self.cls.__qualname__}.__sharedtree_migrate__`"
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
        if unknown and all(name in fields for name in unknown):
            raise self.removed(unknown)
        if unknown:
            listed = ", ".join(f"`{printable(str(name))}`" for name in unknown)
            raise StructureMismatchError(
                f"{hook} returned what `{self.cls.__qualname__}` has no field for, or has for something else: "
                f"{listed}. Return the fields of version {self.layout.version}."
            )
        migrated |= {name: self.default_of(name)() for name in self.lacking(migrated)}
        if rules.is_assigned:
            obj = self.make((fields | held_back).items())
            rules.reassign(obj, migrated)
            return obj
        # What a library keeps of attributes by their names, it keeps of none that is gone.
        gone = {old for old, new in self.new_names.items() if new in fields and new not in migrated}
        for name, kept in held_back.items():
            migrated[name] = {k: v for k, v in kept.items() if k not in gone} if type(kept) is dict else kept
        return self.make(migrated.items())


def renames_in(manifest: Manifest, renames: Renames) -> Renames:
    """The same, with the names that a file has: what its program defined was in `__main__`, and is so called, too."""
    if manifest.main is None:
        return renames
    pairs = [(old.partition(":"), new) for old, new in renames.items()]
    own = {f"{manifest.main}:{rest}": new for (module, _, rest), new in pairs if module in (MAIN, CHILD)}
    return {**own, **renames}


def require_sound_renames(renames: Renames) -> None:
    """Raises `TypeError` if `renames` is no mapping or has no names as values; `ValueError` if a key is no old name."""
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
