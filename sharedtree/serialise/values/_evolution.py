"""Instances of classes whose fields may have changed since the file was written.

A field that was added takes its default; one without a default, or one that was removed, is an error that says what to
do, for guessing would lose data. Three things can be done: `renames=` at the call that loads, which needs no change of
the class; `__sharedtree_names__`, in which a class lists the names that it had; and `__sharedtree_version__` with
`__sharedtree_migrate__`, by which a class takes the fields of an older version and returns those of its own.

Where a library keeps kinds, marks or metadata of the attributes in each instance, the file has them as one more entry.
Neither `renames=` nor a migration sees it: what it says of an attribute stays with the attribute.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..._equinox_internals import without_missing
from ..._errors import FormatError, StructureMismatchError
from ..._printable import printable
from ..trust._names import is_well_formed
from ._attribute_classes import library_of, own_entries, reassign_of
from ._classes import (
    FIELD_KINDS,
    WRAPPER_ATTRIBUTES,
    Layout,
    is_attribute_name,
    kind_of,
    layout_of,
    shadows,
)
from ._nodes import TypeEntry

Renames = Mapping[str, str | type | Callable[..., Any] | None]
"""Old name → new name. Of a class or a function: `"old.mod:Old"` → `"new.mod:New"`, or the new one itself. Of a field:
`"old.mod:Old.weight"` → `"kernel"`, or None to drop the field. Old names that are not in the file do nothing."""

_ABSENT: Any = object()


def builder(entry: TypeEntry, cls: type, renames: Renames) -> Callable[[Sequence[Any]], Any]:
    """A function that makes instances of a class from the values that a file has for its fields.

    Args:
        entry: what the file says of the class.
        cls: the class as it is now.
        renames: see `Renames`.

    Returns:
        values, in the order of the entry's `fields` and `extra` → an instance. It is made by `object.__new__` (a
        namedtuple by `tuple.__new__`), and its fields are set; `__init__` and `__post_init__` are not called.

    Raises:
        StructureMismatchError: if the fields do not fit, and nothing says how they should.
        FormatError: if the file sets an attribute that no save would write.
    """
    if kind_of(cls) not in FIELD_KINDS:
        raise StructureMismatchError(
            f"`{entry.name}` was a {entry.kind} when the file was written, and `{cls.__qualname__}` is none now. Load "
            "the file with the code that wrote it."
        )
    if getattr(cls, "__abstractmethods__", None):
        raise StructureMismatchError(
            f"`{cls.__qualname__}` is abstract now and has no instances. Load it with the code that wrote the file."
        )
    layout = layout_of(cls)
    for name in entry.extra:
        if not is_attribute_name(name, cls):
            raise FormatError(
                f"The file sets the attribute `{printable(name[:80])}` of `{entry.name}`, which no save would write."
            )
        if name not in layout.fields and shadows(cls, name):
            raise FormatError(
                f"The file sets the attribute `{printable(name[:80])}` of `{entry.name}`, in the place of what the "
                "class defines. No save would write that."
            )
    names = [_renamed(entry.name, cls, field, renames) for field in (*entry.fields, *entry.extra)]
    kept = [name for name in names if name is not None]
    if len(set(kept)) != len(kept):
        raise StructureMismatchError(f"After renaming, two fields of `{entry.name}` have one name. Correct `renames=`.")
    migrate = getattr(cls, "__sharedtree_migrate__", None)
    extra = _extra_names(entry, cls, layout, names)
    unknown = [name for name in kept if name not in layout.fields and name not in extra]
    missing = {_renamed(entry.name, cls, field, renames) for field in entry.missing}
    absent = [name for name in layout.fields if name not in kept and name not in missing]
    added = [name for name in absent if layout.kind != "attributes" or not library_of(cls).may_stay_unset(cls, name)]
    if entry.version != layout.version or (migrate is not None and (unknown or added)):
        return _migrating(entry, cls, layout, names, migrate)
    if unknown:
        raise _removed(entry, cls, unknown)
    defaults = {name: _default_of(entry, cls, name) for name in added}
    return _setting(entry, cls, layout, names, defaults)


def require_sound_renames(renames: Renames) -> None:
    """Raises if `renames` has what can be the name of nothing.

    Raises:
        TypeError: if it is no mapping, or a new name is neither a text nor a class, a function or None.
        ValueError: if an old name does not have the form of one.
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


def copy_wrapped_attributes(obj: Any, wrapped: Any) -> None:
    """Copies the name and the documentation of a function into a module, as `equinox.module_update_wrapper` does.

    What the module has of its own stays.
    """
    own = layout_of(type(obj)).attributes_of(obj)
    own.update({name: value for name, value in wrapped_attributes(wrapped).items() if name not in own})


def wrapped_attributes(wrapped: Any) -> dict[str, Any]:
    """What is copied from a wrapped object into the module that wraps it.

    An instance of a class, or a partial, may be of a file's making: its attributes are read from dictionaries, so that
    no property, no `__getattr__` and nothing that the file put there is run.
    """
    cls = type(wrapped)
    if kind_of(cls) is None and not issubclass(cls, functools.partial):
        found = {name: getattr(wrapped, name, _ABSENT) for name in WRAPPER_ATTRIBUTES}
        return {name: value for name, value in found.items() if value is not _ABSENT}
    found = {}
    own: dict[str, Any] = {}
    for base in reversed(type.__getattribute__(cls, "__mro__")):
        held = type.__getattribute__(base, "__dict__")
        found.update({name: held[name] for name in WRAPPER_ATTRIBUTES if name in held})
        if "__dict__" in held:
            own = without_missing(held["__dict__"].__get__(wrapped))
    found.update({name: own[name] for name in WRAPPER_ATTRIBUTES if name in own})
    return {name: value for name, value in found.items() if value is None or type(value) in (str, dict)}


def _setting(
    entry: TypeEntry, cls: Any, layout: Layout, names: list[str | None], defaults: dict[str, Callable[[], Any]]
) -> Callable[[Sequence[Any]], Any]:
    fill = _filler(entry, cls, layout, names)
    if (
        layout.kind != "namedtuple"
        and layout.attributes_of is not None
        and not layout.slots
        and not defaults
        and None not in names
    ):
        new, attributes_of = object.__new__, layout.attributes_of
        finish = _finisher(entry, cls, layout, names)

        def build_plain(values: Sequence[Any]) -> Any:
            obj = new(cls)
            attributes = attributes_of(obj)
            attributes.update(zip(names, values, strict=True))
            return obj if finish is None else finish(obj, attributes)

        return build_plain

    def build(values: Sequence[Any]) -> Any:
        fields = {name: value for name, value in zip(names, values, strict=True) if name is not None}
        for name, make in defaults.items():
            fields[name] = make()
        return fill(fields)

    return build


def _migrating(
    entry: TypeEntry, cls: Any, layout: Layout, names: list[str | None], migrate: Any
) -> Callable[[Sequence[Any]], Any]:
    if entry.version > layout.version:
        raise StructureMismatchError(
            f"The file has version {entry.version} of `{entry.name}`, and the class here has version {layout.version}. "
            "Load it with the newer code, or with the class of that version."
        )
    if migrate is None:
        raise StructureMismatchError(
            f"The file has version {entry.version} of `{entry.name}`, and the class here has version {layout.version}, "
            "but does not say how the fields become those of this version. Add to the class:\n"
            "    @classmethod\n"
            "    def __sharedtree_migrate__(cls, fields: dict, version: int) -> dict:\n"
            "        return fields  # those of that version, made into those of this one"
        )
    fill = _filler(entry, cls, layout, names)
    extra, missing = _extra_names(entry, cls, layout, names), frozenset(entry.missing)
    own: frozenset[str] = frozenset() if layout.kind != "attributes" else own_entries(cls)
    file_names = (*entry.fields, *entry.extra)
    reassign = None if layout.kind != "attributes" else reassign_of(cls)

    def may_be_set(name: Any) -> bool:
        return name in layout.fields or (name not in own and (name in extra or _may_be_added(cls, layout, name)))

    def build(values: Sequence[Any]) -> Any:
        fields = {name: value for name, value in zip(names, values, strict=True) if name is not None}
        held_back = {name: fields.pop(name) for name in own if name in fields}
        try:
            migrated = dict(migrate(dict(fields), entry.version))
        except Exception as error:
            raise StructureMismatchError(
                f"`{cls.__qualname__}.__sharedtree_migrate__` raised {type(error).__name__} on the fields of version "
                f"{entry.version}: {printable(str(error))}"
            ) from error
        declared = [str(name) for name, value in migrated.items() if isinstance(value, dataclasses.Field)]
        if declared:
            raise StructureMismatchError(
                f"`{cls.__qualname__}.__sharedtree_migrate__` returned a declaration as `{printable(declared[0])}`, "
                "as `nnx.data` and `nnx.static` make them. Return the value: a name keeps the mark that it has in "
                "the file, the mark of a new one follows from the value, and what `renames=` renames keeps its mark."
            )
        unknown = [name for name in migrated if not may_be_set(name)]
        if unknown and all(name in fields for name in unknown):
            raise _removed(entry, cls, unknown)
        if unknown:
            listed = ", ".join(f"`{printable(str(name))}`" for name in unknown)
            raise StructureMismatchError(
                f"`{cls.__qualname__}.__sharedtree_migrate__` returned what `{cls.__qualname__}` has no field for, or "
                f"has for something else: {listed}. Return the fields of version {layout.version}."
            )
        for name in layout.fields:
            is_needed = layout.kind != "attributes" or not library_of(cls).may_stay_unset(cls, name)
            if name not in migrated and name not in missing and is_needed:
                migrated[name] = _default_of(entry, cls, name)()
        if reassign is not None:
            obj = fill(fields | held_back)
            reassign(obj, migrated)
            return obj
        gone = {old for old, new in zip(file_names, names, strict=True) if new in fields and new not in migrated}
        return fill(migrated | {name: _without(entries, gone) for name, entries in held_back.items()})

    return build


def _without(entries: Any, gone: set[str]) -> Any:
    """What a library keeps of attributes by their names, without those that are gone."""
    return {k: v for k, v in entries.items() if k not in gone} if type(entries) is dict else entries


def _may_be_added(cls: Any, layout: Layout, name: Any) -> bool:
    """Whether instances may have an attribute of which neither the class nor the file says anything."""
    if layout.kind != "attributes" or not library_of(cls).IS_OPEN:
        return False
    return is_attribute_name(name, cls) and not shadows(cls, name)


def _extra_names(entry: TypeEntry, cls: Any, layout: Layout, names: list[str | None]) -> set[str]:
    """The names of the attributes that no field of the class has, in a file of this entry."""
    extra = set(entry.extra) - set(layout.fields)
    if layout.kind != "attributes" or not library_of(cls).IS_OPEN:
        return extra
    for old, new in zip((*entry.fields, *entry.extra), names, strict=True):
        if new is not None and old in extra and new not in layout.fields:
            if new != old and not _may_be_added(cls, layout, new):
                raise StructureMismatchError(
                    f"`renames` gives the attribute `{printable(old)}` of `{entry.name}` the name `{new}`, which the "
                    "class has for something else. Give another one, or None to drop it."
                )
            extra.add(new)
    return extra


def _finisher(entry: TypeEntry, cls: Any, layout: Layout, names: list[str | None]) -> Any:
    if layout.kind != "attributes":
        return None
    return library_of(cls).finisher(cls, dict(zip((*entry.fields, *entry.extra), names, strict=True)))


def _filler(entry: TypeEntry, cls: Any, layout: Layout, names: list[str | None]) -> Callable[[dict[str, Any]], Any]:
    finish = _finisher(entry, cls, layout, names)

    def fill(fields: dict[str, Any]) -> Any:
        if layout.kind == "namedtuple":
            absent = [name for name in layout.fields if name not in fields]
            if absent:
                raise FormatError(f"The file has a `{cls.__qualname__}` without its field `{printable(absent[0])}`.")
            obj = tuple.__new__(cls, [fields.pop(name) for name in layout.fields])
        else:
            obj = object.__new__(cls)
        attributes = layout.attributes_of(obj) if layout.attributes_of is not None else None
        for name, value in fields.items():
            slot = layout.slots.get(name)
            if slot is not None:
                slot.__set__(obj, value)
            elif attributes is not None:
                attributes[name] = value
            else:
                raise StructureMismatchError(
                    f"`{cls.__qualname__}` has no place for the attribute `{printable(name)}` any more. Drop it:\n"
                    f'    renames={{"{cls.__module__}:{cls.__qualname__}.{printable(name)}": None}}'
                )
        return obj if finish is None or attributes is None else finish(obj, attributes)

    return fill


def _renamed(name: str, cls: type, field: str, renames: Renames) -> str | None:
    for key in (f"{name}.{field}", f"{cls.__module__}:{cls.__qualname__}.{field}"):
        if key in renames:
            new = renames[key]
            if new is not None and (not isinstance(new, str) or not new.isidentifier()):
                raise StructureMismatchError(
                    f"`renames` gives the field `{key}` the name `{new!r}`, which names no field. Give its new name, "
                    "or None to drop it."
                )
            if kind_of(cls) == "attributes" and not {field, new}.isdisjoint(own_entries(cls)):
                raise StructureMismatchError(
                    f"`renames` gives `{key}` the name `{new}`, but one of these is no attribute: in it are kept the "
                    "kinds or marks of all attributes. Leave it out: they follow the attributes that are renamed."
                )
            return new
    return field


def _default_of(entry: TypeEntry, cls: Any, name: str) -> Callable[[], Any]:
    if kind_of(cls) == "namedtuple":
        if name in cls._field_defaults:
            return lambda: cls._field_defaults[name]
    elif name not in getattr(cls, "__dataclass_fields__", {}):
        default = library_of(cls).default_of(cls, name) if kind_of(cls) == "attributes" else None
        if default is not None:
            return default
    else:
        field = cls.__dataclass_fields__[name]
        if field.default is not dataclasses.MISSING:
            return lambda: field.default
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory
    error = StructureMismatchError(
        f"`{cls.__qualname__}` has the field `{name}`, which `{entry.name}` did not have when the file was written, "
        "and which has no default. Give it one:\n"
        f"    {name}: ... = ...\n"
        f'or, if a field of the file is meant: renames={{"{entry.name}.<its old name>": "{name}"}}'
    )
    raise error


def _removed(entry: TypeEntry, cls: Any, unknown: list[str]) -> StructureMismatchError:
    listed = ", ".join(f"`{printable(name)}`" for name in unknown)
    pairs = ", ".join(f'"{entry.name}.{printable(name)}": None' for name in unknown)
    return StructureMismatchError(
        f"The file has fields of `{entry.name}` that `{cls.__qualname__}` does not have: {listed}. Say what became of "
        f"them, a new name, or None to drop them:\n    renames={{{pairs}}}"
    )
