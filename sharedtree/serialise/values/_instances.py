"""Takes instances of classes apart into nodes and types, attribute by attribute, and makes them again.

A type lists the attributes that instances have. A node has the values of one instance, in the same order (`<0.5>` is
short for the written form of 0.5):

    {"name": "equinox.nn:Dropout", "kind": "module", "fields": ["p", "inference"]}      ["object", 0, [<0.5>, false]]

Instances are made by `object.__new__`, namedtuples by `tuple.__new__`. Their attributes are set in `__dict__` or slots
directly, so that no `__init__`, no `__setattr__` and no property runs.

Libraries treat the attributes of their classes in different ways, which an object `AttributeRules` describes. Classes
of the kind `attributes` (modules of treex, of NNX and of this package) declare no attributes. Some libraries keep kinds
or marks of all attributes in one entry of each instance, `own_entries` in the rules.

Words: *fields* are attributes that a class declares. *Extra* attributes are all others that an instance has. *Slots*
are those of `__slots__`.
"""

import contextlib
import functools
import keyword
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...core._class_attributes import ABSENT, dict_descriptor, inherited, is_protocol_name
from ...core._errors import FormatError, SharedTreeError, StructureMismatchError
from ...core._node_types import AttributeRules, ClassKind, RefusalError, library_in_files, without_missing
from ...core._printing import printable
from ...libraries._equinox import WRAPPER_ATTRIBUTES
from ..trust._allow_list import PACKAGES
from ..trust._buildable_classes import FIELD_KINDS, kind_of
from ..trust._public_names import NAMING
from ..trust._resolved_names import renames_as_code
from ._nodes import Decomposition, step_of
from ._written_by_name import Named

_DEFAULT_RULES = AttributeRules()
"""The rules for classes whose library has no rules of its own."""


class Layout(NamedTuple):
    """Places where the instances of a class keep their attributes.

    Attributes:
        kind: how instances are rebuilt, such as `module`, `dataclass` or `namedtuple`.
        fields: declared fields in JAX's order, in which traced fields come first.
        attributes_of: returns the `__dict__` of an instance. None if instances have none.
        slots: name of each slot → its descriptor.
        ignored: attributes that are no data: caches of properties, and entries that `typing` makes.
        version: `__sharedtree_version__` of the class, or 0.
        rules: how the class's library treats attributes, or the rules for any class.
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
    """Returns the layout of a class whose kind is in `FIELD_KINDS`.

    Raises:
        SharedTreeError: if the version of the class is not a whole number.
    """
    layout = _layouts.get(cls)
    if layout is None:
        layout = _layouts[cls] = _find_layout(cls)
    return layout


def rules_of(cls: Any) -> AttributeRules:
    """Returns the rules of a class's library for attributes in files. Default: `_DEFAULT_RULES`."""
    row_and_kind = library_in_files(cls)
    return _DEFAULT_RULES if row_and_kind is None else row_and_kind[0].attributes


def _find_layout(cls: Any) -> Layout:
    """Makes the layout of a class from the dictionaries of the class and its bases.

    Raises:
        SharedTreeError: if the version of the class is not a whole number.
    """
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
    # Pairs of name and value. Those of subclasses come after those of bases, and win in the dict below.
    class_attributes = [item for base in reversed(cls.__mro__) for item in vars(base).items()]
    slots = {name: value for name, value in class_attributes if isinstance(value, types.MemberDescriptorType)}
    cached = {name for name, value in class_attributes if isinstance(value, functools.cached_property)}
    ignored = frozenset({*cached, "__orig_class__", "__weakref__"} - set(fields))
    has_dict = any(name == "__dict__" for name, _ in class_attributes)
    attributes_of = dict_descriptor(cls).__get__ if has_dict else None
    return Layout(kind, fields, attributes_of, slots, ignored, version, rules)


def fault_of_attribute(cls: type, name: Any) -> str | None:
    """Returns the reason why no file may set an attribute of this name in an instance of a class. None if a file may.

    The reason begins with a comma, because it continues a sentence of an error: `The file sets the attribute ...`.

    Args:
        cls: the class.
        name: the name. It may be any value, because an instance's `__dict__` can have keys that are no texts.
    """
    layout = layout_of(cls)
    # `may_have` returns None if the library has no opinion. Then the name must be an identifier of Python.
    allowed = layout.rules.may_have(cls, name) if type(name) is str else False
    if allowed is None:
        allowed = name.isidentifier() and not keyword.iskeyword(name)
    if not allowed:
        return ", which no save would write."
    if name in layout.fields or name in layout.slots:
        return None
    # Other programs may look for an attribute and call it. So of undeclared attributes, a file may set only those that
    # the class lists, and those that `equinox.module_update_wrapper` sets. For the kind `attributes`, a file may set
    # others, too: modules of treex, of NNX and of this package declare none of their attributes.
    if layout.kind == "module" and name in WRITTEN_ATTRIBUTES:
        return None
    # `is_protocol_name`: a name that Python or a tool looks up in any object, such as `_repr_html_`.
    if is_protocol_name(name) and name not in layout.rules.own_entries:
        return ", which other programs would ask for and call. No save would write that."
    class_attribute = inherited(cls, name)
    if layout.kind != "attributes" and class_attribute is ABSENT and name not in listed_attributes(cls):
        return ", which the class does not declare. No save would write that."
    # A file must not replace a method or another descriptor of the class. It may replace a plain value, because a class
    # with such a value declares the attribute.
    is_defined = class_attribute is not ABSENT
    is_taken = is_defined and (callable(class_attribute) or hasattr(type(class_attribute), "__get__"))
    return ", in the place of what the class defines. No save would write that." if is_taken else None


def listed_attributes(cls: type) -> frozenset[str]:
    """Returns the names that a class and its bases list in `__sharedtree_attributes__`.

    The listed attributes are no fields, but files may set them. A listing is a tuple of names or a single name.
    """
    dictionaries = [type.__getattribute__(base, "__dict__") for base in cls.__mro__]
    listings = [names.get("__sharedtree_attributes__", ()) for names in dictionaries]
    return frozenset(name for names in listings for name in ((names,) if type(names) is str else names))


class _WrittenType(NamedTuple):
    """The entry in `types` of instances with the same attributes, and the order of their children.

    Attributes:
        number: index of the entry in `types`.
        names: attributes in the order in which the walk visits them.
        steps: the step of a path to each attribute, in the same order.
        positions: for each value in a node, the position of its attribute in `names`. None if both orders are the same.
    """

    number: int
    names: list[str]
    steps: list[str]
    positions: list[int] | None


class Instances:
    """Takes the instances of one tree apart, and collects their types.

    Args:
        types: entries of `types` in the manifest. New entries are appended.
        named: the classes named in the file. New classes are added.
    """

    def __init__(self, types: list[dict[str, Any]], named: Named) -> None:
        self._types = types
        self._named = named
        # (class, names of copied attributes, names of all attributes) → type.
        self._written_types: dict[Any, _WrittenType] = {}

    def take_apart(self, obj: Any, cls: Any) -> Decomposition:
        """Takes an instance of a class apart, attribute by attribute.

        Args:
            obj: the instance.
            cls: its class, whose kind is in `FIELD_KINDS`.

        Raises:
            RefusalError: if the instance has an attribute forbidden in files, or its library has a reason to refuse
                it.
        """
        layout = layout_of(cls)
        # `without_missing` drops attributes that have a mark of their library in the place of a value.
        attributes = without_missing(layout.attributes_of(obj)) if layout.attributes_of is not None else {}
        if layout.kind == "namedtuple":
            attributes = {**attributes, **dict(zip(layout.fields, obj, strict=True))}
        elif layout.slots:
            attributes = dict(attributes)
            for name, slot in layout.slots.items():
                # A slot that was never set raises.
                with contextlib.suppress(AttributeError):
                    attributes[name] = slot.__get__(obj)
        if layout.kind == "attributes":
            # Puts them into the order of the walk, and turns them into the form that a file has.
            attributes = layout.rules.attributes_for_file(obj, attributes, NAMING)
        # Two instances of one class can have different attributes. Then they have different types in the file. An
        # Equinox module may copy attributes from the function in one of its fields, its *wrapped* field. A file does
        # not have the copies: see "attributes that an Equinox module copies" below.
        wrapped, copied = find_wrapped_field(layout.fields, attributes) if layout.kind == "module" else (None, ())
        key = (cls, copied, *attributes)
        written_type = self._written_types.get(key)
        if written_type is None:
            written_type = self._written_types[key] = self._add_type(cls, layout, attributes, copied)
        number, names, steps, positions = written_type
        children = [attributes[name] for name in names]
        if positions is not None:
            return Decomposition(children, steps, lambda written: ["object", number, [written[i] for i in positions]])
        if wrapped is not None:
            return Decomposition(children, steps, lambda written: ["wrapper", number, written, wrapped])
        return Decomposition(children, steps, lambda written: ["object", number, written])

    def _add_type(self, cls: type, layout: Layout, attributes: dict[str, Any], copied: tuple[str, ...]) -> _WrittenType:
        """Adds the type of an instance to the manifest. Returns its number, and the order of its children.

        Args:
            cls: the class.
            layout: the layout of the class.
            attributes: all attributes of the instance.
            copied: names of attributes that are not written, because loading copies them from the wrapped field.

        Raises:
            RefusalError: if the instance has an attribute forbidden in files.
        """
        fields = [name for name in layout.fields if name in attributes]
        # Names that are no extra attributes: fields, caches and the like, and copies.
        no_extra = {*fields, *layout.ignored, *copied, "__annotations__"}
        extra = sorted([name for name in attributes if name not in no_extra], key=str)
        refused = next((name for name in extra if fault_of_attribute(cls, name) is not None), None)
        if refused is not None:
            raise RefusalError(
                f"a `{cls.__qualname__}` with the attribute `{str(refused)[:80]}`, which is no field of its class, and "
                "which no file may set",
                _how_to_declare(cls, refused),
            )
        entry: dict[str, Any] = {"name": self._named.add(cls), "kind": layout.kind, "fields": fields}
        missing = [name for name in layout.fields if name not in attributes]
        # These keys are left out of the entry if their value is empty or 0.
        optional = {"missing": missing, "extra": extra, "version": layout.version}
        self._types.append(entry | {key: value for key, value in optional.items() if value})
        names, number = [*fields, *extra], len(self._types) - 1
        if layout.kind != "attributes":
            return _WrittenType(number, names, [f".{name}" for name in names], None)
        # The dict of attributes is in JAX's order, in which the walk visits them. The node has their values in the
        # order of the type: fields first, then extra attributes.
        names_in_walk = [name for name in attributes if name in names]
        positions = [names_in_walk.index(name) for name in names]
        return _WrittenType(number, names_in_walk, [step_of(name) for name in names_in_walk], positions)


def _how_to_declare(cls: type, name: Any) -> str:
    """Returns the advice in an error about an attribute that a class does not declare.

    Args:
        cls: the class.
        name: the attribute. It may be any value, because an instance's `__dict__` can have keys that are no texts.
    """
    if type(name) is not str or is_protocol_name(name):
        return "Delete it."
    # True if the class could list the attribute, unless it is a class of a library that its user cannot change.
    is_free = name.isidentifier() and inherited(cls, name) is ABSENT and kind_of(cls) != "attributes"
    if not is_free or cls.__module__.partition(".")[0] in PACKAGES:
        return "Make it a field of the class."
    return f'Make it a field of the class, or list it there: `__sharedtree_attributes__ = ("{name[:80]}",)`.'


def maker_from_pairs(
    cls: Any, new_names: Mapping[str, str | None], renames: Mapping[str, Any]
) -> Callable[[Iterable[tuple[str, Any]]], Any]:
    """Returns a function that makes an instance from pairs of an attribute's name and its value.

    Args:
        cls: the class.
        new_names: name in the file → name now, which `AttributeRules.finish_loaded` gets. None for a dropped attribute.
        renames: the option of `load`. The code that errors offer repeats it.

    The returned function raises `FormatError` if the field of a namedtuple is absent, and `StructureMismatchError` if
    the class has no place for an attribute.
    """
    layout = layout_of(cls)
    attributes_of, slots = layout.attributes_of, layout.slots

    def make(pairs: Iterable[tuple[str, Any]]) -> Any:
        """Makes an instance of any class, also of a namedtuple or a class with slots or with rules of its library."""
        if layout.kind == "namedtuple":
            values = dict(pairs)
            missing = next((name for name in layout.fields if name not in values), None)
            if missing is not None:
                raise FormatError(f"The file has a `{cls.__qualname__}` without its field `{printable(missing)}`.")
            obj = tuple.__new__(cls, [values.pop(name) for name in layout.fields])
            # The other attributes are those that an instance of a subclass of a namedtuple has in its `__dict__`.
            pairs = values.items()
        else:
            obj = object.__new__(cls)
        attributes = None if attributes_of is None else attributes_of(obj)
        for name, value in pairs:
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
        return obj if attributes is None else layout.rules.finish_loaded(obj, attributes, new_names)

    def make_plain(pairs: Iterable[tuple[str, Any]]) -> Any:
        """Makes an instance of a class whose instances have only a `__dict__`. Checks nothing, so it is faster."""
        obj = object.__new__(cls)
        attributes_of(obj).update(pairs)  # pyright: ignore[reportOptionalCall]
        return obj

    # Most classes have only a `__dict__` and no rules, and a large model has many instances of them.
    is_plain = layout.kind in ("module", "dataclass") and attributes_of is not None and not slots
    return make_plain if is_plain else make


# --- attributes that an Equinox module copies from the function that it wraps -----------------------------------------
#
# `equinox.module_update_wrapper` copies name, documentation and annotations (`WRAPPER_ATTRIBUTES`) from a function into
# the module that wraps it in one of its fields. Annotations may be texts, and other programs evaluate such texts to get
# the types. So a file never contains annotations. It names the wrapped field. On loading, the module gets copies of all
# those attributes of the field's value that were equal to its own when the file was written.

WRITTEN_ATTRIBUTES = frozenset(WRAPPER_ATTRIBUTES) - {"__annotations__"}
"""The copied attributes that a file may hold. Annotations are not among them."""


class WrappedField(NamedTuple):
    """The field with the function that a module wraps.

    Attributes:
        field: name of the field. None if the module wraps none of its fields.
        copied: names of the attributes that are copied from the value of the field on loading.
    """

    field: str | None
    copied: tuple[str, ...]


_NOT_WRAPPED = WrappedField(None, ())


def find_wrapped_field(fields: Sequence[str], attributes: dict[str, Any]) -> WrappedField:
    """Finds the field that a module wraps, by comparing the module's attributes with those of each field's value.

    The *compared attributes* are `WRAPPER_ATTRIBUTES`. A field can be the wrapped one under two conditions:

    - The module has all compared attributes that the field's value has.
    - Their annotations are equal, because no file has annotations. Other attributes may differ, such as the name of a
      module that was renamed after it was made: the file has them. In a module without annotations, all compared
      attributes must be equal.

    Of several such fields, it is the first with the most equal attributes.

    Args:
        fields: names of the module's fields.
        attributes: all attributes of the module.
    """
    best_match = _NOT_WRAPPED
    # `module_update_wrapper` always sets `__module__`. Most modules wrap nothing and have none.
    if "__module__" not in attributes:
        return best_match
    module_attributes = {name: attributes[name] for name in WRAPPER_ATTRIBUTES if name in attributes}
    for field in fields:
        copies = copied_attributes(attributes[field]) if field in attributes else {}
        equal_names = [name for name in module_attributes if name in copies and copies[name] == module_attributes[name]]
        # The half after `or` is for modules without annotations.
        has_all_annotations = "__annotations__" in equal_names or len(equal_names) == len(module_attributes)
        is_wrapped = copies.keys() <= module_attributes.keys() and has_all_annotations
        # Several fields may hold functions.
        if is_wrapped and len(equal_names) > len(best_match.copied):
            best_match = WrappedField(field, tuple(equal_names))
    return best_match


def copy_wrapped_attributes(obj: Any, wrapped: Any) -> None:
    """Copies attributes into a module from an object, as `equinox.module_update_wrapper` does.

    Attributes that the module already has are kept.

    Args:
        obj: the module, which is changed.
        wrapped: the object from which attributes are copied.
    """
    module_attributes = dict_descriptor(type(obj)).__get__(obj)
    copies = copied_attributes(wrapped)
    module_attributes.update({name: value for name, value in copies.items() if name not in module_attributes})


def copied_attributes(wrapped: Any) -> dict[str, Any]:
    """Returns the attributes that `module_update_wrapper` would copy from an object, as a dict: name → value.

    The attributes of a function are read as usual. But if the object is a partial, or an instance of a class that files
    may describe, its attributes may come from a file. Then they are read from the dictionaries of the instance, its
    class and its bases, so that no property and no `__getattr__` runs and nothing of the file is called. For the same
    reason only texts, None and dicts are returned: a file or a class may have anything else under these names.
    """
    cls = type(wrapped)
    if kind_of(cls) is None and not issubclass(cls, functools.partial):
        attributes = {name: getattr(wrapped, name, ABSENT) for name in WRAPPER_ATTRIBUTES}
        return {name: value for name, value in attributes.items() if value is not ABSENT}
    # Later dictionaries win. So bases come first, then subclasses, then the instance.
    bases = reversed(type.__getattribute__(cls, "__mro__"))
    dictionaries = [type.__getattribute__(base, "__dict__") for base in bases]
    descriptors = [names["__dict__"] for names in dictionaries if "__dict__" in names]
    # `without_missing` drops attributes that have a mark of their library in the place of a value.
    instance_dicts = [without_missing(descriptor.__get__(wrapped)) for descriptor in descriptors]
    attributes: dict[str, Any] = {}
    # All descriptors return the one `__dict__` of the instance, so one is enough. Classes with only slots have none.
    for names in (*dictionaries, *instance_dicts[-1:]):
        attributes |= {name: names[name] for name in WRAPPER_ATTRIBUTES if name in names}
    return {name: value for name, value in attributes.items() if value is None or type(value) in (str, dict)}
