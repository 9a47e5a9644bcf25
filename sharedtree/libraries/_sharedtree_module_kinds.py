"""Of which kind each attribute of a `Module` is: where that is kept, and what the flatten functions make of it.

There are four kinds: parameter, state, sub-tree and static (see `_sharedtree_module_values`). The kind of a value that
is not marked follows from the value, whenever it is assigned. A mark stays with the attribute when another value is
assigned. What follows from a container that was static is asked again whenever the module is taken apart, since
somebody may have put an array into it. What an assignment does is in `_sharedtree_module_assignment`.

The kinds of all attributes of an instance are one `Kinds`, in a slot beside its `__dict__`. It cannot be changed, and
equal ones are one object, so whether two modules are alike in this is told by `is`:

    Linear(weight=w, calls=n, activation=f)     Kinds(weight: parameter, calls: state, activation: static)

Where the slot lacks a name that the `__dict__` has, as after `vars(module).update(...)`, its kind follows from the
value, too.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jax import tree_util as jtu

from ..core._class_attributes import built_in_base, dataclass_entries, dict_descriptor, inherited
from ..core._errors import UnregisteredTypeError
from ..core._jax_internals import registered_functions
from ..core._locks import Lock
from ._sharedtree_module_values import STATIC, Kind, Marked, is_container, kind_of_value

KINDS_SLOT = "_sharedtree_kinds"
"""The slot in which an instance has its `Kinds`."""

DECLARED = "sharedtree"
"""Under which key the metadata of a dataclass field has the kind that the field declares."""


class Kinds:
    """The names of a module's attributes, in the order of its `__dict__`, and the kind of each.

    Made by `kinds_of` only. Equal ones are one object.

    Attributes:
        items: pairs of a name and a kind.
        by_name: the same as a dictionary, not to be changed.
        children: the names of all but the static attributes.
        statics: the names of the static ones.
        names: all names, for the native walk.
        are_static: of each of these, whether it is static; None if not all of them are texts.
    """

    __slots__ = ("__weakref__", "are_static", "by_name", "children", "items", "names", "statics")

    def __init__(self, items: tuple[tuple[str, Kind], ...]) -> None:
        self.items = items
        self.by_name: dict[str, Kind] = dict(items)
        self.children = tuple([name for name, kind in items if kind != STATIC])
        self.statics = tuple([name for name, kind in items if kind == STATIC])
        self.names = tuple([name for name, _ in items])
        are_texts = all(type(name) is str for name in self.names)
        self.are_static = bytes(kind == STATIC for _, kind in items) if are_texts else None

    def __repr__(self) -> str:
        return f"Kinds({', '.join(f'{name}: {kind}' for name, kind in self.items)})"

    def __copy__(self) -> "Kinds":
        return self

    def __deepcopy__(self, memo: Any) -> "Kinds":
        return self

    def __reduce__(self) -> Any:
        return kinds_of, (self.items,)


_made: weakref.WeakValueDictionary[tuple[tuple[str, Kind], ...], Kinds] = weakref.WeakValueDictionary()
_making = Lock()


def kinds_of(items: Iterable[tuple[str, Kind]]) -> Kinds:
    """The one `Kinds` with these items."""
    key = tuple(items)
    with _making:
        known = _made.get(key)
        if known is None:
            known = _made[key] = Kinds(key)
        return known


NO_KINDS = kinds_of(())


class HasKinds:
    """The base class of `Module`, which has the slot."""

    __slots__ = ("__dict__", "__weakref__", KINDS_SLOT)

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """The slot is set, so that the native walk reads modules without attributes, too."""
            require_init(cls, bool(args or kwargs))
            made = super().__new__(cls)
            note_kinds(made, NO_KINDS)
            return made


def require_init(cls: Any, has_arguments: bool) -> None:
    """Raises where `object` would, and where a class declares fields and is no dataclass.

    Raises:
        TypeError: which says so.
    """
    undeclared = of_class(cls).undeclared
    if undeclared is not None:
        raise TypeError(
            f"`{cls.__name__}.{undeclared}` declares a field of a dataclass, but `{cls.__name__}` is none. Decorate it "
            "with `@dataclasses.dataclass(eq=False)`, or mark the attribute where it is assigned, in `__init__`."
        )
    if has_arguments and cls.__init__ is object.__init__:
        raise TypeError(f"`{cls.__name__}()` takes no arguments: it has no `__init__`, and is no dataclass.")


def is_read_by_kinds(cls: type) -> bool:
    """Whether the instances of a class can be read and built past all its methods, with the outcome that JAX has."""
    flatten, unflatten = registered_functions(cls)
    if flatten is not take_apart or getattr(unflatten, "func", None) is not put_together or unflatten.args != (cls,):
        return False
    if built_in_base(cls) is not object or inherited(cls, KINDS_SLOT) is not HasKinds.__dict__[KINDS_SLOT]:
        return False
    return dict_descriptor(cls) is HasKinds.__dict__["__dict__"]


def noted_kinds(module: Any) -> Kinds:
    """What an instance has in its slot; none if it was made past all that sets it."""
    try:
        return object.__getattribute__(module, KINDS_SLOT)
    except AttributeError:
        return NO_KINDS


def note_kinds(module: Any, kinds: Kinds) -> None:
    """Sets the slot."""
    object.__setattr__(module, KINDS_SLOT, kinds)


def attributes_of(module: Any) -> dict[str, Any]:
    """The `__dict__` of an instance, whatever its class does to attributes."""
    return object.__getattribute__(module, "__dict__")


# --- taking apart and putting together -----------------------------------------------------------------------------


def present_kinds(module: Any) -> Kinds:
    """The kinds of the attributes that an instance has now, without those that are no part of it.

    Cost: one step for each attribute, and for each part of a static container.
    """
    cls: Any = type(module)
    noted = noted_kinds(module)
    declared, ignored, _ = of_class(cls)
    found: list[tuple[str, Kind]] = []
    for name, value in attributes_of(module).items():
        kind = noted.by_name.get(name)
        if kind is None:
            if name in ignored:
                continue
            if type(value) is Marked:
                raise _marker_past_assignment(cls, name)
            kind = declared.get(name) or kind_of_value(value)
        elif kind == STATIC and name not in declared and is_container(value):
            kind = kind_of_value(value)
        found.append((name, kind))
    items = tuple(found)
    return noted if items == noted.items else kinds_of(items)


def take_apart(module: Any) -> tuple[Sequence[Any], Any]:
    """The flatten function that every `Module` is registered with: children; kinds and static values."""
    kinds, attributes = present_kinds(module), attributes_of(module)
    return [attributes[name] for name in kinds.children], (kinds, tuple([attributes[name] for name in kinds.statics]))


def take_apart_with_keys(module: Any) -> tuple[Iterable[tuple[Any, Any]], Any]:
    """As `take_apart`, with the names of the attributes as keys."""
    children, aux = take_apart(module)
    return list(zip(map(jtu.GetAttrKey, aux[0].children), children, strict=True)), aux


def put_together(cls: Any, aux: Any, children: Iterable[Any]) -> Any:
    """The inverse. No method of the class is called, and the children may be any objects."""
    kinds, statics = aux
    module = blank(cls)
    of_children, of_statics = iter(children), iter(statics)
    attributes = attributes_of(module)
    for name, kind in kinds.items:
        attributes[name] = next(of_statics if kind == STATIC else of_children)
    note_kinds(module, kinds)
    return module


def blank(cls: Any) -> Any:
    """An instance without attributes, past everything that its class does."""
    return object.__new__(cls)


def with_kinds(cls: Any, kinds: Kinds) -> Any:
    """An instance without attributes that knows of which kinds they will be."""
    module = blank(cls)
    note_kinds(module, kinds)
    return module


def kinds_in(aux: Any) -> Kinds | None:
    """The kinds in the auxiliary data of a module; None if it is that of anything else."""
    is_ours = type(aux) is tuple and len(aux) == 2 and type(aux[0]) is Kinds
    return aux[0] if is_ours else None


def static_attributes(aux: Any) -> dict[str, Any]:
    """The static attributes of a module, by name, from its auxiliary data."""
    kinds, values = aux
    return dict(zip(kinds.statics, values, strict=True))


def copied(module: Any, copy_of: Callable[[Kind | None, Any], Any], memo: dict[int, Any] | None = None) -> Any:
    """A module of the same class and kinds.

    Args:
        module: the original.
        copy_of: the kind of an attribute, None if it was not assigned, and its value → that of the copy.
        memo: gets the copy before the attributes are copied, as `copy.deepcopy` has it.
    """
    made = blank(type(module))
    if memo is not None:
        memo[id(module)] = made  # alive: whoever copies has it
    kinds = noted_kinds(module)
    note_kinds(made, kinds)
    # Not what was noted: somebody may have put an array or a module into what was static.
    present = present_kinds(module).by_name
    copies = {name: copy_of(present.get(name), value) for name, value in attributes_of(module).items()}
    attributes_of(made).update(copies)
    return made


class OfClass(NamedTuple):
    """What a class says of the attributes of its instances.

    Attributes:
        declared: the kinds that the fields of a dataclass declare by `st.parameter()`, `st.state_field()` or
            `static=True`.
        ignored: attributes that are no data: what `functools.cached_property` keeps, and what `typing` notes.
        undeclared: a field that the class declares without being a dataclass; None if there is none.
    """

    declared: dict[str, Kind]
    ignored: frozenset[str]
    undeclared: str | None = None


_of_classes: weakref.WeakKeyDictionary[type, OfClass] = weakref.WeakKeyDictionary()


def of_class(cls: Any) -> OfClass:
    """What a class says; asked once, when its first instance is."""
    known = _of_classes.get(cls)
    if known is None:
        declared: dict[str, Kind] = {}
        for name, field in dataclass_entries(cls).items():
            if DECLARED in field.metadata:
                declared[name] = field.metadata[DECLARED]
            elif field.metadata.get("static", False):
                declared[name] = STATIC
        cached = [k for base in cls.__mro__ for k, v in vars(base).items() if isinstance(v, functools.cached_property)]
        known = _of_classes[cls] = OfClass(declared, frozenset({*cached, "__orig_class__"}), _undeclared(cls))
    return known


def _undeclared(cls: Any) -> str | None:
    """A field that a class declares without being a dataclass: `dataclasses` takes those of its own away."""
    fields = dataclass_entries(cls)
    held = [item for base in cls.__mro__ for item in vars(base).items() if isinstance(item[1], dataclasses.Field)]
    return next((name for name, field in held if fields.get(name) is not field), None)


def _marker_past_assignment(cls: Any, name: str) -> UnregisteredTypeError:
    return UnregisteredTypeError(
        f"`{cls.__name__}.{name}` was marked, but not set by assignment, as where the class is a frozen dataclass. "
        "Leave out `frozen=True`, or declare the field:\n"
        f"    {name}: jax.Array = sharedtree.parameter()",
        (f".{name}",),
    )
