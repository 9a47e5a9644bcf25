"""The kinds of the attributes of a `Module`, and its flatten functions, which follow from them.

There are four kinds: parameter, state, sub-tree and static (see `_sharedtree_module_values`). An assignment notes the
kind (see `_sharedtree_module_assignment`): that of the mark, or else the one that follows from the value. A mark stays
with the attribute when another value is assigned.

The *noted* kinds of an instance are one `Kinds`, in a slot beside its `__dict__`. A `Kinds` cannot be changed, and
equal ones are one object, so that `is` compares the kinds of two modules:

    Linear(weight=w, calls=n, activation=f)     Kinds(weight: parameter, calls: state, activation: static)

The *present* kinds are those by which a module is flattened. They differ from the noted ones in two cases. The
`__dict__` may have a name that was never assigned, as after `vars(module).update(...)`. And somebody may have put an
array into a container that was static. In both cases the kind follows from the present value.
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
"""The name of the slot for the noted kinds of an instance."""

DECLARED = "sharedtree"
"""The key in the metadata of a dataclass field for the kind that the field declares."""


class Kinds:
    """The names of a module's attributes, in the order of its `__dict__`, and the kind of each.

    Only `kinds_of` makes instances. Equal ones are one object.

    Attributes:
        items: pairs of a name and a kind.
        by_name: name → kind. Do not change it.
        children: the names of all attributes that are not static.
        statics: the names of the static attributes.
        names: all names, for the native walk.
        are_static: one byte for each name, 1 if the attribute is static. None if a name is no plain `str`, which the
            native walk does not read.
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


# Items → the one `Kinds` with these items.
_interned: weakref.WeakValueDictionary[tuple[tuple[str, Kind], ...], Kinds] = weakref.WeakValueDictionary()
_interning = Lock()


def kinds_of(items: Iterable[tuple[str, Kind]]) -> Kinds:
    """Returns the one `Kinds` with these items."""
    key = tuple(items)
    with _interning:
        kinds = _interned.get(key)
        if kinds is None:
            kinds = _interned[key] = Kinds(key)
        return kinds


NO_KINDS = kinds_of(())


class HasKinds:
    """The base class of `Module`. It has the slot for the noted kinds."""

    __slots__ = ("__dict__", "__weakref__", KINDS_SLOT)

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Makes an instance with an empty `Kinds`, so that the native walk can read a module without attributes."""
            require_init(cls, bool(args or kwargs))
            module = super().__new__(cls)
            note_kinds(module, NO_KINDS)
            return module


def require_init(cls: Any, has_arguments: bool) -> None:
    """Checks that a class can be called.

    Args:
        cls: the class.
        has_arguments: True if the call has arguments.

    Raises:
        TypeError: if the class declares fields of a dataclass but is none, or if there are arguments and no `__init__`.
            `object.__new__` would raise for the latter, but it does not see that `HasKinds` passes no arguments on.
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
    """Returns True if the native walk may read and build instances itself, with the same result as by JAX.

    That needs our own functions in JAX's registry, and the slot and the `__dict__` of `HasKinds`.
    """
    flatten, unflatten = registered_functions(cls)
    if flatten is not take_apart or getattr(unflatten, "func", None) is not put_together or unflatten.args != (cls,):
        return False
    if built_in_base(cls) is not object or inherited(cls, KINDS_SLOT) is not HasKinds.__dict__[KINDS_SLOT]:
        return False
    return dict_descriptor(cls) is HasKinds.__dict__["__dict__"]


def noted_kinds(module: Any) -> Kinds:
    """Returns the noted kinds of an instance. They are empty if it was made without our `__new__`."""
    try:
        return object.__getattribute__(module, KINDS_SLOT)
    except AttributeError:
        return NO_KINDS


def note_kinds(module: Any, kinds: Kinds) -> None:
    """Sets the noted kinds of an instance."""
    object.__setattr__(module, KINDS_SLOT, kinds)


def attributes_of(module: Any) -> dict[str, Any]:
    """Returns the `__dict__` of an instance, without calling methods of its class."""
    return object.__getattribute__(module, "__dict__")


# --- taking apart and putting together -----------------------------------------------------------------------------


def present_kinds(module: Any) -> Kinds:
    """Returns the present kinds of an instance. Ignored attributes, such as cached properties, are left out.

    Cost: one step for each attribute, and for each part of a static container.
    """
    cls: Any = type(module)
    noted = noted_kinds(module)
    declared, ignored, _ = of_class(cls)
    present: list[tuple[str, Kind]] = []
    for name, value in attributes_of(module).items():
        kind = noted.by_name.get(name)
        if kind is None:
            # The attribute was not assigned.
            if name in ignored:
                continue
            if type(value) is Marked:
                raise _marker_past_assignment(cls, name)
            kind = declared.get(name) or kind_of_value(value)
        # A static list may hold an array by now.
        elif kind == STATIC and name not in declared and is_container(value):
            kind = kind_of_value(value)
        present.append((name, kind))
    items = tuple(present)
    return noted if items == noted.items else kinds_of(items)


def take_apart(module: Any) -> tuple[Sequence[Any], Any]:
    """Flattens a module. Returns its children, and as auxiliary data its kinds and static values.

    Every `Module` is registered with this function.
    """
    kinds, attributes = present_kinds(module), attributes_of(module)
    return [attributes[name] for name in kinds.children], (kinds, tuple([attributes[name] for name in kinds.statics]))


def take_apart_with_keys(module: Any) -> tuple[Iterable[tuple[Any, Any]], Any]:
    """Flattens a module like `take_apart`, with the names of the attributes as keys."""
    children, aux = take_apart(module)
    return list(zip(map(jtu.GetAttrKey, aux[0].children), children, strict=True)), aux


def put_together(cls: Any, aux: Any, children: Iterable[Any]) -> Any:
    """Unflattens a module. No method of the class is called, and the children may be any objects."""
    kinds, statics = aux
    module = blank(cls)
    next_children, next_statics = iter(children), iter(statics)
    attributes = attributes_of(module)
    for name, kind in kinds.items:
        attributes[name] = next(next_statics if kind == STATIC else next_children)
    note_kinds(module, kinds)
    return module


def blank(cls: Any) -> Any:
    """Makes an instance without attributes, without calling methods of its class."""
    return object.__new__(cls)


def with_kinds(cls: Any, kinds: Kinds) -> Any:
    """Makes an instance without attributes, whose kinds are noted already. Copies and pickles begin with it."""
    module = blank(cls)
    note_kinds(module, kinds)
    return module


def kinds_in(aux: Any) -> Kinds | None:
    """Returns the kinds in the auxiliary data of a module. None for the auxiliary data of another class."""
    is_ours = type(aux) is tuple and len(aux) == 2 and type(aux[0]) is Kinds
    return aux[0] if is_ours else None


def static_attributes(aux: Any) -> dict[str, Any]:
    """Returns the static attributes in the auxiliary data of a module, by name."""
    kinds, values = aux
    return dict(zip(kinds.statics, values, strict=True))


def copied(module: Any, copy_of: Callable[[Kind | None, Any], Any], memo: dict[int, Any] | None = None) -> Any:
    """Copies a module. The copy has the same class and the same noted kinds.

    Args:
        module: the original.
        copy_of: (kind, value) → the value for the copy. The kind of an ignored attribute is None.
        memo: the memo of `copy.deepcopy`. It gets the copy before the attributes are copied.
    """
    new_module = blank(type(module))
    # The caller keeps the original alive, so its id stays its own.
    if memo is not None:
        memo[id(module)] = new_module
    kinds = noted_kinds(module)
    note_kinds(new_module, kinds)
    # The present kinds, because somebody may have put an array or a module into a container that was static.
    present = present_kinds(module).by_name
    copies = {name: copy_of(present.get(name), value) for name, value in attributes_of(module).items()}
    attributes_of(new_module).update(copies)
    return new_module


class OfClass(NamedTuple):
    """Facts about the attributes of all instances of a class.

    Attributes:
        declared: the kinds that the fields of a dataclass declare by `st.parameter()`, `st.state_field()` or
            `static=True`.
        ignored: names of attributes that are no data: values of cached properties, and `__orig_class__`, which
            `typing` sets on instances.
        undeclared: the name of a dataclass field in a class that is no dataclass; None if there is none.
    """

    declared: dict[str, Kind]
    ignored: frozenset[str]
    undeclared: str | None = None


_of_classes: weakref.WeakKeyDictionary[type, OfClass] = weakref.WeakKeyDictionary()


def of_class(cls: Any) -> OfClass:
    """Returns the facts about a class, which are computed once."""
    facts = _of_classes.get(cls)
    if facts is None:
        declared: dict[str, Kind] = {}
        for name, field in dataclass_entries(cls).items():
            if DECLARED in field.metadata:
                declared[name] = field.metadata[DECLARED]
            elif field.metadata.get("static", False):
                declared[name] = STATIC
        ignored = {"__orig_class__"}
        for base in cls.__mro__:
            ignored.update(name for name, value in vars(base).items() if isinstance(value, functools.cached_property))
        facts = _of_classes[cls] = OfClass(declared, frozenset(ignored), _undeclared(cls))
    return facts


def _undeclared(cls: Any) -> str | None:
    """Returns the name of a dataclass field in a class that is no dataclass, or None.

    `@dataclass` removes the `Field` objects from the class. So a `Field` that is still there was never processed.
    """
    fields = dataclass_entries(cls)
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if isinstance(value, dataclasses.Field) and fields.get(name) is not value:
                return name
    return None


def _marker_past_assignment(cls: Any, name: str) -> UnregisteredTypeError:
    """Returns the error for a marked value that was put into the `__dict__` without an assignment."""
    return UnregisteredTypeError(
        f"`{cls.__name__}.{name}` was marked, but not set by assignment, as where the class is a frozen dataclass. "
        "Leave out `frozen=True`, or declare the field:\n"
        f"    {name}: jax.Array = sharedtree.parameter()",
        (f".{name}",),
    )
