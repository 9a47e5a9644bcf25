"""How the instances of a class come apart, into a node and a type, and how they are made again.

A type says which attributes instances have, and a node has the values of one in that order:

    {"name": "equinox.nn:Dropout", "kind": "module", "fields": ["p", "inference"]}      ["object", 0, [<0.5>, false]]

Instances are made by `object.__new__`, namedtuples by `tuple.__new__`. Their attributes are set past all that the class
does to attributes: no `__init__`, no `__setattr__`, no property.
"""

import contextlib
import functools
import keyword
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ...core._class_attributes import ABSENT, dict_descriptor, inherited, is_asked_of_all
from ...core._errors import FormatError, SharedTreeError, StructureMismatchError
from ...core._node_types import AttributeRules, ClassKind, RefusalError, library_in_files, without_missing
from ...core._printing import printable
from ..trust._allow_list import PACKAGES
from ..trust._buildable_classes import FIELD_KINDS, kind_of
from ..trust._public_names import NAMING
from ..trust._resolved_names import renames_as_code
from ._nodes import Apart, step_of
from ._wrapped_attributes import WRITTEN_ATTRIBUTES, wrapped_field
from ._written_by_name import Named

_PLAIN = AttributeRules()


class Layout(NamedTuple):
    """Where the instances of a class keep what they hold.

    `fields` are in JAX's order, those that it traces first. `attributes_of` gives the `__dict__` of an instance, and is
    None if there is none; `slots` has the descriptor of each slot. `ignored` are attributes that are no data: caches of
    properties, and what `typing` notes. `version` is what the class says in `__sharedtree_version__`, else 0.
    """

    kind: ClassKind
    fields: tuple[str, ...]
    attributes_of: Callable[[Any], dict[str, Any]] | None
    slots: dict[str, Any]
    ignored: frozenset[str]
    version: int
    rules: AttributeRules


_layouts: weakref.WeakKeyDictionary[type, Layout] = weakref.WeakKeyDictionary()


def layout_of(cls: Any) -> Layout:
    """The layout of a class of `FIELD_KINDS`. Raises `SharedTreeError` if its version is not a whole number."""
    known = _layouts.get(cls)
    if known is None:
        known = _layouts[cls] = _find_layout(cls)
    return known


def rules_of(cls: Any) -> AttributeRules:
    """What a library says of a class that is written attribute by attribute; else what holds of any class."""
    found = library_in_files(cls)
    return _PLAIN if found is None else found[0].attributes


def _find_layout(cls: Any) -> Layout:
    kind = kind_of(cls)
    assert kind in FIELD_KINDS
    rules = rules_of(cls)
    version = getattr(cls, "__sharedtree_version__", 0)
    if type(version) is not int or version < 0:
        raise SharedTreeError(
            f"`{cls.__qualname__}.__sharedtree_version__` is {version!r}. Let it be a whole number, and count it up "
            "when the fields change:\n    __sharedtree_version__ = 1"
        )
    if kind in ("namedtuple", "placeholder"):
        fields: tuple[str, ...] = getattr(cls, "_fields", ())
    else:
        fields = rules.declared_fields(cls)
    held = [item for base in reversed(cls.__mro__) for item in vars(base).items()]
    slots = {name: value for name, value in held if isinstance(value, types.MemberDescriptorType)}
    cached = {name for name, value in held if isinstance(value, functools.cached_property)}
    ignored = frozenset({*cached, "__orig_class__", "__weakref__"} - set(fields))
    attributes_of = dict_descriptor(cls).__get__ if any(name == "__dict__" for name, _ in held) else None
    return Layout(kind, fields, attributes_of, slots, ignored, version, rules)


def fault_of_attribute(cls: type, name: Any) -> str | None:
    """Why a file may not have an attribute of this name, which is no field, in an instance; None if it may."""
    layout = layout_of(cls)
    allowed = layout.rules.may_have(cls, name) if type(name) is str else False
    if allowed is None:
        allowed = name.isidentifier() and not keyword.iskeyword(name)
    if not allowed:
        return ", which no save would write."
    if name in layout.fields or name in layout.slots:
        return None
    # What a class does not declare may be something that other programs ask for, and call. So instances have no more
    # than what the class lists, and what `equinox.module_update_wrapper` sets. Instances of treex's, of NNX's and of
    # this package's modules are all in attributes that nobody declares.
    if layout.kind == "module" and name in WRITTEN_ATTRIBUTES:
        return None
    if is_asked_of_all(name) and name not in layout.rules.own_entries:
        return ", which other programs would ask for and call. No save would write that."
    held = inherited(cls, name)
    if layout.kind != "attributes" and held is ABSENT and name not in listed_attributes(cls):
        return ", which the class does not declare. No save would write that."
    # A file could replace a method in this way. Plain values of the class it may: the class has declared them.
    is_taken = held is not ABSENT and (callable(held) or hasattr(type(held), "__get__"))
    return ", in the place of what the class defines. No save would write that." if is_taken else None


def listed_attributes(cls: type) -> frozenset[str]:
    """The attributes that are no fields, but that a class or one of its bases lists in `__sharedtree_attributes__`."""
    held = [type.__getattribute__(base, "__dict__").get("__sharedtree_attributes__", ()) for base in cls.__mro__]
    return frozenset(name for each in held for name in ((each,) if type(each) is str else each))


class Instances:
    """Takes the instances of a tree apart, and adds their types and their classes to what it is given."""

    def __init__(self, types: list[dict[str, Any]], named: Named) -> None:
        self._types = types
        self._named = named
        self._known: dict[Any, tuple[int, list[str], list[str], list[int] | None]] = {}

    def take_apart(self, obj: Any, cls: Any) -> Apart:
        """An instance of a class that is written field by field. Raises `RefusalError` if it cannot be written."""
        layout = layout_of(cls)
        attributes = without_missing(layout.attributes_of(obj)) if layout.attributes_of is not None else {}
        if layout.kind == "namedtuple":
            attributes = {**attributes, **dict(zip(layout.fields, obj, strict=True))}
        elif layout.slots:
            attributes = dict(attributes)
            for name, slot in layout.slots.items():
                with contextlib.suppress(AttributeError):  # a slot that was never set
                    attributes[name] = slot.__get__(obj)
        if layout.kind == "attributes":
            attributes = layout.rules.written(obj, attributes, NAMING)
        # Of two siblings one may have attributes of its own, so each is asked.
        wrapped, copied = wrapped_field(layout.fields, attributes) if layout.kind == "module" else (None, ())
        key = (cls, copied, *attributes)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._new_type(cls, layout, attributes, copied)
        number, names, steps, places = known
        children = [attributes[name] for name in names]
        if places is not None:
            return Apart(children, steps, lambda done: ["object", number, [done[i] for i in places]])
        if wrapped is not None:
            return Apart(children, steps, lambda done: ["wrapper", number, done, wrapped])
        return Apart(children, steps, lambda done: ["object", number, done])

    def _new_type(
        self, cls: type, layout: Layout, attributes: dict[str, Any], copied: tuple[str, ...]
    ) -> tuple[int, list[str], list[str], list[int] | None]:
        """The number of a new type, the names of the children and the steps to them, and their places in the node."""
        fields = [name for name in layout.fields if name in attributes]
        skipped = {*fields, *layout.ignored, *copied, "__annotations__"}
        extra = sorted([name for name in attributes if name not in skipped], key=str)
        refused = next((name for name in extra if fault_of_attribute(cls, name) is not None), None)
        if refused is not None:
            raise RefusalError(
                f"a `{cls.__qualname__}` with the attribute `{str(refused)[:80]}`, which is no field of its class, and "
                "which no file may set",
                _how_to_declare(cls, refused),
            )
        entry: dict[str, Any] = {"name": self._named.add(cls), "kind": layout.kind, "fields": fields}
        missing = [name for name in layout.fields if name not in attributes]
        more = {"missing": missing, "extra": extra, "version": layout.version}
        self._types.append(entry | {key: value for key, value in more.items() if value})
        names, number = [*fields, *extra], len(self._types) - 1
        if layout.kind != "attributes":
            return number, names, [f".{name}" for name in names], None
        # JAX traces some that are no declared fields, and they come first.
        visited = [name for name in attributes if name in names]
        return number, visited, [step_of(name) for name in visited], [visited.index(name) for name in names]


def _how_to_declare(cls: type, name: Any) -> str:
    """What to do about an attribute that a class does not declare."""
    if type(name) is not str or is_asked_of_all(name):
        return "Delete it."
    is_free = name.isidentifier() and inherited(cls, name) is ABSENT and kind_of(cls) != "attributes"
    if not is_free or cls.__module__.partition(".")[0] in PACKAGES:
        return "Make it a field of the class."
    return f'Make it a field of the class, or list it there: `__sharedtree_attributes__ = ("{name[:80]}",)`.'


def maker(
    cls: Any, new_names: Mapping[str, str | None], renames: Mapping[str, Any]
) -> Callable[[Iterable[tuple[str, Any]]], Any]:
    """What makes an instance of pairs of an attribute and its value.

    `new_names` are those of `AttributeRules.finished`, and `renames` is the option of the call, for errors.
    """
    layout = layout_of(cls)
    attributes_of, slots = layout.attributes_of, layout.slots

    def make(items: Iterable[tuple[str, Any]]) -> Any:
        if layout.kind == "namedtuple":
            values = dict(items)
            absent = next((name for name in layout.fields if name not in values), None)
            if absent is not None:
                raise FormatError(f"The file has a `{cls.__qualname__}` without its field `{printable(absent)}`.")
            obj = tuple.__new__(cls, [values.pop(name) for name in layout.fields])
            items = values.items()
        else:
            obj = object.__new__(cls)
        attributes = None if attributes_of is None else attributes_of(obj)
        for name, value in items:
            if name in slots:
                slots[name].__set__(obj, value)
            elif attributes is not None:
                attributes[name] = value
            else:
                dropped = renames_as_code(renames, {f"{cls.__module__}:{cls.__qualname__}.{name}": None})
                raise StructureMismatchError(
                    f"`{cls.__qualname__}` has no place for the attribute `{printable(name)}` any more. Drop it:\n"
                    f"    renames={{{dropped}}}"
                )
        return obj if attributes is None else layout.rules.finished(obj, attributes, new_names)

    def make_plain(items: Iterable[tuple[str, Any]]) -> Any:
        obj = object.__new__(cls)
        attributes_of(obj).update(items)  # pyright: ignore[reportOptionalCall]
        return obj

    # Most are like this, and a large model has many.
    is_plain = layout.kind in ("module", "dataclass") and attributes_of is not None and not slots
    return make_plain if is_plain else make
