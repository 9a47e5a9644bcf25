"""Kinds of the attributes of a `Module`, and its flatten functions, which follow from the kinds.

There are four kinds. Attributes of the first three are children of the module. A static one is part of its structure:

    parameter   marked by `st.parameter`: traced, and trainable
    state       marked by `st.state_field`: traced, and nothing in it is trainable
    sub-tree    an array, a module or a container of these, without a mark: traced. In it, modules decide by their own
                marks, and bare arrays are not trainable.
    static      anything else

An assignment stores the kind (see `_sharedtree_module`): the kind of the mark, or else the one that follows from the
value. A mark stays with the attribute when another value is assigned. The *stored* kinds of an instance are one
`Kinds`, in a slot beside its `__dict__`. A `Kinds` cannot be changed, and equal ones are one object. So `is` compares
the kinds of two modules:

    Linear(weight=w, calls=n, activation=f)     Kinds(weight: parameter, calls: state, activation: static)

The *present* kinds are those by which a module is flattened. They differ from the stored kinds in two cases. The
`__dict__` may have a name that was never assigned, as after `vars(module).update(...)`. And somebody may have put an
array into a container that was static. In both cases the kind follows from the present value.

The end of the file has the rules for values without a mark, and the errors for values that no module can hold.
"""

import collections
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, MappingView, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np
from jax import tree_util as jtu

from ..core._by_identity import IdentitySet
from ..core._class_attributes import built_in_base, dataclass_entries, dict_descriptor, inherited
from ..core._errors import UnregisteredTypeError
from ..core._jax_internals import registered_functions
from ..core._locks import Lock
from ..core._node_types import PYTHON_NUMBERS, carries_identity, is_traced, node_type_of
from ..core._printing import shown

AttributeKind = Literal["parameter", "state", "sub-tree", "static"]

PARAMETER: AttributeKind = "parameter"
STATE: AttributeKind = "state"
SUBTREE: AttributeKind = "sub-tree"
STATIC: AttributeKind = "static"

# The two kinds that only a mark can give.
MARKED = frozenset({PARAMETER, STATE})
ALL_KINDS: frozenset[Any] = frozenset({PARAMETER, STATE, SUBTREE, STATIC})


KINDS_SLOT = "_sharedtree_kinds"
"""Name of the slot for the stored kinds of an instance. Also on disk."""

DECLARED = "sharedtree"
"""Key in the metadata of a dataclass field for the kind that the field declares."""


class Kinds:
    """Names of a module's attributes, in the order of its `__dict__`, with the kind of each.

    Only `kinds_of` makes instances. Equal ones are one object.

    Attributes:
        items: pairs of a name and a kind.
        by_name: name → kind. Do not change it.
        children: the names of all other attributes.
        statics: the names of the static attributes.
        names: all names, for the native walk.
        are_static: one byte for each name, 1 if the attribute is static. None if a name is no plain `str`, which the
            native walk does not read.
    """

    __slots__ = ("__weakref__", "are_static", "by_name", "children", "items", "names", "statics")

    def __init__(self, items: tuple[tuple[str, AttributeKind], ...]) -> None:
        self.items = items
        self.by_name: dict[str, AttributeKind] = dict(items)
        self.children = tuple([name for name, kind in items if kind != STATIC])
        self.statics = tuple([name for name, kind in items if kind == STATIC])
        self.names = tuple([name for name, _ in items])
        are_texts = all(type(name) is str for name in self.names)
        self.are_static = bytes(kind == STATIC for _, kind in items) if are_texts else None

    def __repr__(self) -> str:
        return f"Kinds({', '.join(f'{name}: {kind}' for name, kind in self.items)})"

    # A `Kinds` cannot be changed, so it is its own copy. A pickle leads to the one `Kinds` with these items.
    def __copy__(self) -> "Kinds":
        return self

    def __deepcopy__(self, memo: Any) -> "Kinds":
        return self

    def __reduce__(self) -> Any:
        return kinds_of, (self.items,)


# Items → the one `Kinds` with these items. Kinds that no module has any more are dropped.
_interned: weakref.WeakValueDictionary[tuple[tuple[str, AttributeKind], ...], Kinds] = weakref.WeakValueDictionary()
_interned_lock = Lock()


def kinds_of(items: Iterable[tuple[str, AttributeKind]]) -> Kinds:
    """Returns the one `Kinds` with these items."""
    key = tuple(items)
    with _interned_lock:
        kinds = _interned.get(key)
        if kinds is None:
            kinds = _interned[key] = Kinds(key)
        return kinds


NO_KINDS = kinds_of(())


class HasKinds:
    """Base class of `Module`. It has the slot for the stored kinds."""

    __slots__ = ("__dict__", "__weakref__", KINDS_SLOT)

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Makes an instance with an empty `Kinds`, so that the native walk can read a module without attributes."""
            require_init(cls, bool(args or kwargs))
            module = super().__new__(cls)
            store_kinds(module, NO_KINDS)
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
    undeclared = facts_of(cls).undeclared
    if undeclared is not None:
        raise TypeError(
            f"`{cls.__name__}.{undeclared}` declares a field of a dataclass, but `{cls.__name__}` is none. Decorate it "
            "with `@dataclasses.dataclass(eq=False)`, or mark the attribute where it is assigned, in `__init__`."
        )
    if has_arguments and cls.__init__ is object.__init__:
        raise TypeError(f"`{cls.__name__}()` takes no arguments: it has no `__init__`, and is no dataclass.")


def is_read_by_kinds(cls: type) -> bool:
    """Returns True if the native walk may read and build instances itself, with the same result as by JAX.

    That needs our own functions in JAX's registry, and the slot and the `__dict__` of `HasKinds`. A subclass may have
    registered other functions, or have attributes that hide the slot or the `__dict__`.
    """
    flatten, unflatten = registered_functions(cls)
    if flatten is not take_apart or getattr(unflatten, "func", None) is not put_together or unflatten.args != (cls,):
        return False
    if built_in_base(cls) is not object or inherited(cls, KINDS_SLOT) is not HasKinds.__dict__[KINDS_SLOT]:
        return False
    return dict_descriptor(cls) is HasKinds.__dict__["__dict__"]


def stored_kinds(module: Any) -> Kinds:
    """Returns the stored kinds of an instance. They are empty if it was made without our `__new__`."""
    try:
        return object.__getattribute__(module, KINDS_SLOT)
    except AttributeError:
        return NO_KINDS


def store_kinds(module: Any, kinds: Kinds) -> None:
    """Sets the stored kinds of an instance."""
    object.__setattr__(module, KINDS_SLOT, kinds)


def attributes_of(module: Any) -> dict[str, Any]:
    """Returns the `__dict__` of an instance, without calling methods of its class."""
    return object.__getattribute__(module, "__dict__")


# --- taking apart and putting together -----------------------------------------------------------------------------


def present_kinds(module: Any) -> Kinds:
    """Returns the present kinds of an instance. Ignored attributes, such as cached properties, are left out.

    Cost: one step for each attribute, and for each part of a static container.

    Raises:
        UnregisteredTypeError: if a marked value was put into the `__dict__` without an assignment.
    """
    cls: Any = type(module)
    stored = stored_kinds(module)
    declared, ignored, _ = facts_of(cls)
    present: list[tuple[str, AttributeKind]] = []
    for name, value in attributes_of(module).items():
        kind = stored.by_name.get(name)
        if kind is None:
            # The attribute was not assigned.
            if name in ignored:
                continue
            if type(value) is Marked:
                raise _unassigned_mark_error(cls, name)
            kind = declared.get(name) or kind_of_value(value)
        # A static list may hold an array by now.
        elif kind == STATIC and name not in declared and is_container(value):
            kind = kind_of_value(value)
        present.append((name, kind))
    items = tuple(present)
    return stored if items == stored.items else kinds_of(items)


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
    store_kinds(module, kinds)
    return module


def blank(cls: Any) -> Any:
    """Makes an instance without attributes, without calling methods of its class."""
    return object.__new__(cls)


def with_kinds(cls: Any, kinds: Kinds) -> Any:
    """Makes an instance with stored kinds, but without attributes. Copies and pickles begin with it."""
    module = blank(cls)
    store_kinds(module, kinds)
    return module


def kinds_in(aux: Any) -> Kinds | None:
    """Returns the kinds in the auxiliary data of a module. None for the auxiliary data of another class."""
    is_ours = type(aux) is tuple and len(aux) == 2 and type(aux[0]) is Kinds
    return aux[0] if is_ours else None


def static_attributes(aux: Any) -> dict[str, Any]:
    """Returns the static attributes in the auxiliary data of a module, by name."""
    kinds, values = aux
    return dict(zip(kinds.statics, values, strict=True))


def copied(module: Any, copy_of: Callable[[AttributeKind | None, Any], Any], memo: dict[int, Any] | None = None) -> Any:
    """Copies a module. The copy has the same class and the same stored kinds.

    Args:
        module: the original.
        copy_of: (kind, value) → the value for the copy. The kind of an ignored attribute is None.
        memo: the memo of `copy.deepcopy`. It gets the copy before the attributes are copied.
    """
    new_module = blank(type(module))
    # The caller keeps the original alive, so its id stays its own.
    if memo is not None:
        memo[id(module)] = new_module
    kinds = stored_kinds(module)
    store_kinds(new_module, kinds)
    # The present kinds, because somebody may have put an array or a module into a container that was static.
    present = present_kinds(module).by_name
    copies = {name: copy_of(present.get(name), value) for name, value in attributes_of(module).items()}
    attributes_of(new_module).update(copies)
    return new_module


class ClassFacts(NamedTuple):
    """Facts about the attributes of all instances of a class.

    Attributes:
        declared: the kinds declared in the fields of a dataclass by `st.parameter()`, `st.state_field()` or
            `static=True`.
        ignored: names of attributes that are no data: values of cached properties, and `__orig_class__`, which
            `typing` sets on instances.
        undeclared: name of a dataclass field if the class is no dataclass. None if it has no such field.
    """

    declared: dict[str, AttributeKind]
    ignored: frozenset[str]
    undeclared: str | None = None


_facts_by_class: weakref.WeakKeyDictionary[type, ClassFacts] = weakref.WeakKeyDictionary()


def facts_of(cls: Any) -> ClassFacts:
    """Returns the facts about a class. They are computed once."""
    facts = _facts_by_class.get(cls)
    if facts is None:
        # Kinds that fields declare.
        declared: dict[str, AttributeKind] = {}
        for name, field in dataclass_entries(cls).items():
            if DECLARED in field.metadata:
                declared[name] = field.metadata[DECLARED]
            elif field.metadata.get("static", False):
                declared[name] = STATIC
        # Attributes that are no data.
        ignored = {"__orig_class__"}
        for base in cls.__mro__:
            ignored.update(name for name, value in vars(base).items() if isinstance(value, functools.cached_property))
        facts = _facts_by_class[cls] = ClassFacts(declared, frozenset(ignored), _undeclared(cls))
    return facts


def _undeclared(cls: Any) -> str | None:
    """Returns the name of a dataclass field if the class is no dataclass, or None.

    `@dataclass` removes the `Field` objects from the class. So a `Field` that is still there was never processed.
    """
    fields = dataclass_entries(cls)
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if isinstance(value, dataclasses.Field) and fields.get(name) is not value:
                return name
    return None


def _unassigned_mark_error(cls: Any, name: str) -> UnregisteredTypeError:
    """Returns the error for a marked value put into the `__dict__` without an assignment."""
    return UnregisteredTypeError(
        f"`{cls.__name__}.{name}` got a `sharedtree.parameter(...)` or `sharedtree.state_field(...)`, but without an "
        "assignment.\n"
        "A frozen dataclass sets its attributes without one. Leave out `frozen=True`, or declare the field:\n"
        f"    {name}: jax.Array = sharedtree.parameter()",
        (f".{name}",),
    )


# --- kinds of values --------------------------------------------------------------------------------------------------
#
# From here on, `head` is the beginning of an error's sentence: the attribute that gets the value, in words.


class Marked:
    """Value with the mark of `st.parameter` or `st.state_field`. An assignment to an attribute takes the mark off."""

    __slots__ = ("kind", "value")

    def __init__(self, kind: AttributeKind, value: Any) -> None:
        self.kind: AttributeKind = kind
        self.value = value


def require_markable(value: Any, kind: AttributeKind, head: str) -> None:
    """Checks that a value can be marked: None, an array, a number, a module, or a container of these.

    Raises:
        UnregisteredTypeError: if it cannot.
    """
    if value is None or type(value) in PYTHON_NUMBERS or is_array(value) or is_traced(value, "jax"):
        return
    if node_type_of(value) is not None:
        # Raises the errors about values in a container.
        kind_of_value(value, head)
        return
    # The error about hidden arrays or modules says more than the next one.
    require_no_hidden_children(value, head)
    raise UnregisteredTypeError(
        f"{head} is {_NAMES[kind]}, and cannot be {shown(value)}. It must be an array, a number, a module or a "
        "container of these.\n"
        f"Delete the attribute first, so that it is no longer {_NAMES[kind]}:\n"
        "    del module.attribute\n"
        "    module.attribute = value",
        ("",),
    )


# Kind of an attribute → its words in errors.
_NAMES: dict[AttributeKind, str] = {PARAMETER: "a parameter", STATE: "state"}


def require_no_hidden_children(value: Any, head: str) -> None:
    """Checks that an object that is no node holds no arrays or modules. Nobody would see them there.

    Raises:
        UnregisteredTypeError: for views of dictionaries and for iterators, for sets and other objects with arrays or
            modules in them, and for methods of modules. The message has a fix.
    """
    cls: Any = type(value)
    if isinstance(value, MappingView) or (isinstance(value, Iterator) and cls.__module__ in ("builtins", "itertools")):
        raise UnregisteredTypeError(
            f"{head} is assigned a `{cls.__name__}`, which is not itself a container, so it cannot be part of a "
            "pytree. Make it a list:\n"
            "    module.attribute = list(value)",
            ("",),
        )
    if isinstance(value, (set, frozenset)) and _hidden_child(value) is not None:
        raise UnregisteredTypeError(
            f"{head} is assigned a `{cls.__name__}` of arrays or modules, which has no order, so it cannot be a "
            "pytree. Make it a list:\n"
            "    module.attribute = list(value)",
            ("",),
        )
    if isinstance(value, types.MethodType) and _is_jax_or_module(value.__self__):
        raise UnregisteredTypeError(
            f"{head} is assigned a bound method of a `{type(value.__self__).__name__}`, which would still use the old "
            "object after a transform or a copy. Make it a property:\n"
            "    @property\n"
            "    def attribute(self):\n"
            "        return self.method",
            ("",),
        )
    # A function may close over arrays. JAX treats these as constants, so they are allowed.
    if isinstance(value, type) or callable(value):
        return
    child_path = _hidden_child(value)
    if child_path is not None:
        raise UnregisteredTypeError(
            f"{head} is assigned a `{cls.__name__}`, which holds an array or a module as `{child_path}`, but is not a "
            "registered pytree node, so nothing inside it can be seen. Let the class be a module, too:\n"
            f"    class {cls.__name__}(sharedtree.Module): ...\n"
            "or register it with JAX:\n"
            f"    jax.tree_util.register_pytree_node({cls.__name__}, flatten, unflatten)",
            ("",),
        )


# Most objects to search for arrays and modules in one value. A large object would make an assignment slow.
_MOST_SEARCHED = 1_000


def _hidden_child(value: Any) -> str | None:
    """Finds an array or a module in an object that is no node: in an attribute or an item, or in containers in these.

    Returns:
        Its path as code, such as `layers[0]`. None if the first thousand objects have none.
    """
    seen = IdentitySet()
    stack = [*_attributes_of(value), *_items_of(value)]
    while stack and len(seen) < _MOST_SEARCHED:
        path, part = stack.pop()
        if _is_jax_or_module(part):
            return path.removeprefix(".")
        # `add` returns False if the part was seen before.
        if seen.add(part):
            stack += [(path + step, item) for step, item in _items_of(part)]
    return None


def _attributes_of(value: Any) -> list[tuple[str, Any]]:
    """Returns the attributes of an object in slots and in its `__dict__`, each with its step: `.name`."""
    slots = [name for base in type(value).__mro__ for name in _slots_of(base)]
    in_slots = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return [(f".{name}", part) for name, part in (in_slots | getattr(value, "__dict__", {})).items()]


def _slots_of(cls: type) -> list[str]:
    """Returns the names of the slots declared by a class itself."""
    return [name for name, value in vars(cls).items() if isinstance(value, types.MemberDescriptorType)]


def _items_of(value: Any) -> list[tuple[str, Any]]:
    """Returns the items of a container of Python or of a class derived from one, each with its step: `[key]`."""
    if isinstance(value, (dict, collections.UserDict, collections.ChainMap, types.MappingProxyType)):
        return [(f"[{shown(key)}]", part) for key, part in value.items()]
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.ravel().tolist()
    if isinstance(value, (list, tuple, set, frozenset, collections.deque, collections.UserList)):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    return []


def is_array(value: Any) -> bool:
    """Returns True for an array that JAX can trace, or an object that converts to an array by `__jax_array__`."""
    is_array_like = carries_identity(value) or hasattr(type(value), "__jax_array__")
    return is_array_like and is_traced(value, "jax")


def _is_child(value: Any) -> bool:
    """Returns True for an array or a module: it has to be a child of the module around it."""
    if is_array(value):
        return True
    node_type = node_type_of(value)
    return node_type is not None and not node_type.is_plain


def _is_jax_or_module(value: Any) -> bool:
    """Returns True for a JAX array or a module. A NumPy array may be hidden, as a constant."""
    return isinstance(value, jax.Array) or (_is_child(value) and not carries_identity(value))


def is_container(value: Any) -> bool:
    """Returns True for a plain container other than None."""
    node_type = node_type_of(value)
    return value is not None and node_type is not None and node_type.is_plain


def kind_of_value(value: Any, head: str | None = None) -> AttributeKind:
    """Returns the kind of a value without a mark: sub-tree or static.

    Args:
        value: the value.
        head: beginning of errors. None to skip the checks of static values.

    Raises:
        UnregisteredTypeError: if a container holds a marked value, or, with a head, if an object in the value hides
            arrays or modules.
    """
    # None is a node without children. Like an empty list, it may be replaced by an array later.
    if value is None or _is_child(value):
        return SUBTREE
    if not is_container(value):
        if head is not None:
            require_no_hidden_children(value, head)
        return STATIC
    # A container: all values in it, and in containers in it.
    holds_children, holds_others, can_be_filled = False, False, False
    seen = IdentitySet()
    stack: list[Any] = [value]
    while stack:
        part = stack.pop()
        if type(part) is Marked:
            raise UnregisteredTypeError(
                f"{head or 'An attribute'} is a container with {_NAMES[part.kind]} in it, but only a whole attribute "
                "can be marked. Mark the container:\n"
                "    module.attribute = sharedtree.parameter(value)",
                ("",),
            )
        if _is_child(part):
            holds_children = True
        elif not is_container(part):
            holds_others = holds_others or part is not None
            if head is not None:
                require_no_hidden_children(part, head)
        # A container that was not seen before. `add` returns False for one that was.
        elif seen.add(part):
            node_type = node_type_of(part)
            assert node_type is not None
            can_be_filled = can_be_filled or node_type.is_mutable
            stack.extend(node_type.take_apart(part)[0])
    # A list that is still empty, or a dictionary of None, will probably get arrays or modules.
    return SUBTREE if holds_children or (can_be_filled and not holds_others) else STATIC
