"""What a library says of its classes whose instances are all in their attributes, declared or not.

The objects of Flax NNX and the trees of treeo have a file each with what differs, and `sharedtree.Module`s a class at
the end of this one. All other instances are written as `Library` itself has it: as those of a dataclass are.

What a module of Equinox has of the function that it wraps: a name, documentation and annotations of its own, which
`equinox.module_update_wrapper` copies. Texts in annotations are evaluated by whoever asks for the types that they name.
So a file has no annotations: it says from which field a reader is to copy them again, as far as they are equal.

A `sharedtree.Module` is what its `__dict__` holds, and of which kind each attribute is. The kinds are written as one
more attribute, which modules that are alike in this have together:

    ["object", <Linear>, [weight, calls, activation, {"weight": "parameter", "calls": "state", "activation": "static"}]]

They also say in which order the attributes are, which is that of the leaves. None of the class's code runs when a file
is loaded, and a file that says nothing of the kinds, or not of all attributes, gets those that follow from the values.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core._class_attributes import ABSENT, dict_descriptor
from ...core._errors import FormatError
from ...core._plain_containers import is_namedtuple
from ...libraries import _module as attribute_kinds
from ...libraries._equinox import without_missing
from ...libraries._module import KINDS_SLOT
from ...libraries._module_values import ALL_KINDS
from ...nn._assignment import assign, forget
from ..trust._classes import kind_of

_ASKED = frozenset({"_asdict", "for_json", "to_dict", "to_json", "tolist"})


def is_asked_of_all(name: Any) -> bool:
    """Whether programs ask any object for an attribute of this name, and call what they get.

    Python does so with `__names__`, notebooks with `_repr_html_` and `_ipython_display_`, what makes JSON with
    `tolist`. Where a class lets its instances have any attribute, a file could put a function there.
    """
    if type(name) is not str:
        return False
    is_enclosed = name.startswith("_") and name.endswith("_") and name.strip("_") != ""
    return is_enclosed or name in _ASKED or name.startswith(("_repr_", "_ipython_", "__array", "__jax"))


class Library:
    """How instances are written and completed.

    Attributes:
        is_open: whether the attributes are nowhere declared, so that one that is unknown is no mistake.
        own_entries: the names under which a file has what the library itself keeps in each instance: kinds, marks,
            metadata. They stand among the names of attributes, but those who write classes know nothing of them.
        is_assigned: whether `reassign` gives an instance what a migration made; else it is set as a file's values are.
    """

    is_open: bool = False
    own_entries: frozenset[str] = frozenset()
    is_assigned: bool = False

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        """The attributes that a class declares; what JAX traces comes first, as in JAX's order."""
        declared = sorted(dataclasses.fields(cls), key=lambda field: bool(field.metadata.get("static", False)))
        return tuple([field.name for field in declared])

    def may_have(self, cls: Any, name: str) -> bool | None:
        """Whether an attribute that is not declared may have a name; None if there is no rule but Python's."""

    def may_stay_unset(self, cls: Any, name: str) -> bool:
        """Whether instances need not have a field."""
        return False

    def default_of(self, cls: Any, name: str) -> Callable[[], Any] | None:
        """What makes the default of a field that a file lacks; None if it has none."""
        field = getattr(cls, "__dataclass_fields__", {}).get(name)
        if field is not None and field.default_factory is not dataclasses.MISSING:
            return field.default_factory
        of_namedtuple = cls._field_defaults if is_namedtuple(cls) else {}
        default = of_namedtuple.get(name, dataclasses.MISSING) if field is None else field.default
        return None if default is dataclasses.MISSING else lambda: default

    def written(self, obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
        """The attributes as they are written: those that JAX traces come first. Raises `RefusalError`."""
        return attributes

    def static_attributes(self, aux: Any) -> dict[str, Any]:
        """The attributes that JAX does not trace, of the auxiliary data that the flatten function gives."""
        return dict(aux)

    def finished(self, obj: Any, attributes: dict[str, Any], new_names: Mapping[str, str | None]) -> Any:
        """An instance whose attributes are as a file has them, checked and completed, or one that is equal to it.

        `new_names` has each name in the file, and the one that the attribute has now, or None if it was dropped. Raises
        `FormatError`.
        """
        return obj

    def reassign(self, obj: Any, values: Mapping[str, Any]) -> None:
        """Gives an instance these attributes and no others, as assignments would. None of the class's code runs."""


WRAPPER_ATTRIBUTES = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")
"""What `equinox.module_update_wrapper` copies from a wrapped function into a module."""

WRITTEN_ATTRIBUTES = frozenset(WRAPPER_ATTRIBUTES) - {"__annotations__"}
"""Those of them that a file may hold."""


def wrapped_field(fields: Sequence[str], attributes: dict[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """The field from whose value a reader is to copy, as `module_update_wrapper` did, and which attributes those are.

    A module may have a name of its own since then, which is written. Its annotations are not, so they must be the same.
    """
    best: tuple[str | None, tuple[str, ...]] = None, ()
    if "__module__" not in attributes:
        return best
    own = {name: attributes[name] for name in WRAPPER_ATTRIBUTES if name in attributes}
    for field in fields:
        there = wrapped_attributes(attributes[field]) if field in attributes else {}
        same = tuple([name for name in own if name in there and there[name] == own[name]])
        is_wrapped = there.keys() <= own.keys() and ("__annotations__" in same or len(same) == len(own))
        if is_wrapped and len(same) > len(best[1]):
            best = field, same
    return best


def copy_wrapped_attributes(obj: Any, wrapped: Any) -> None:
    """Copies into a module what `equinox.module_update_wrapper` does. What the module has of its own stays."""
    own = dict_descriptor(type(obj)).__get__(obj)
    own.update({name: value for name, value in wrapped_attributes(wrapped).items() if name not in own})


def wrapped_attributes(wrapped: Any) -> dict[str, Any]:
    """What is copied from a wrapped object into the module that wraps it.

    An instance of a class, or a partial, may be of a file's making: its attributes are read from dictionaries, so that
    no property, no `__getattr__` and nothing that the file put there is run.
    """
    cls = type(wrapped)
    if kind_of(cls) is None and not issubclass(cls, functools.partial):
        found = {name: getattr(wrapped, name, ABSENT) for name in WRAPPER_ATTRIBUTES}
        return {name: value for name, value in found.items() if value is not ABSENT}
    dictionaries = [type.__getattribute__(base, "__dict__") for base in reversed(type.__getattribute__(cls, "__mro__"))]
    own = [without_missing(held["__dict__"].__get__(wrapped)) for held in dictionaries if "__dict__" in held]
    found = {name: held[name] for held in (*dictionaries, *own[-1:]) for name in WRAPPER_ATTRIBUTES if name in held}
    return {name: value for name, value in found.items() if value is None or type(value) in (str, dict)}


class MutableModules(Library):
    """See the module's docstring."""

    is_open = True
    own_entries = frozenset({KINDS_SLOT})
    is_assigned = True

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        return tuple([field.name for field in dataclasses.fields(cls)]) if dataclasses.is_dataclass(cls) else ()

    def written(self, obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
        kinds = attribute_kinds.present_kinds(obj)
        return {name: attributes[name] for name in (*kinds.children, *kinds.statics)} | {KINDS_SLOT: kinds.by_name}

    def static_attributes(self, aux: Any) -> dict[str, Any]:
        return attribute_kinds.static_attributes(aux)

    def finished(self, obj: Any, attributes: dict[str, Any], new_names: Mapping[str, str | None]) -> Any:
        said: Any = attribute_kinds.noted_kinds(obj)
        if type(said) is attribute_kinds.Kinds:  # the file says nothing of them
            return obj
        # Texts first: an object of the file's making would be asked for its hash.
        are_texts = type(said) is dict and all(type(text) is str for text in (*said, *said.values()))
        if not are_texts or not ALL_KINDS.issuperset(said.values()):
            what = f"kinds of the attributes of a `{type(obj).__qualname__}` that are none"
            raise FormatError(f"The file has {what}. No save would write that.")
        known = {new_names.get(name) or name: kind for name, kind in said.items()}
        items = [(name, kind) for name, kind in known.items() if name in attributes]
        values = dict(attributes)
        attributes.clear()
        attributes.update({name: values.pop(name) for name, _ in items} | values)
        attribute_kinds.note_kinds(obj, attribute_kinds.kinds_of(items))
        return obj

    def reassign(self, obj: Any, values: Mapping[str, Any]) -> None:
        attributes = attribute_kinds.attributes_of(obj)
        for name in [name for name in attributes if name not in values]:
            forget(obj, name)
            del attributes[name]
        for name, value in values.items():
            if name not in attributes or attributes[name] is not value:
                attributes[name] = assign(obj, name, value)
