"""Private attributes of Flax NNX, which the native walk reads and sets itself. For all that is public, see `_nnx.py`.

The registered functions of NNX are Python, so each module, variable and state costs microseconds in either direction.
C can read and set the same attributes, with the same result, as long as these names mean what they mean in Flax 0.12:

- `Pytree`, the base class of all *objects* of NNX, such as modules: the attributes are in the `__dict__`. One of them,
  `_pytree__nodes`, is a `HashableMapping` (with the dictionary `_mapping`) from names to *marks*. A mark is True if the
  attribute is a child. `_pytree__has_int_keys` says whether names are read as numbers.
- `Variable`: the slots `_raw_value`, `_var_metadata` (a dictionary, sorted in the flatten) and `_trace_state`. Its
  hooks are not run.
- `PytreeState`: the slots `_initializing`, `_is_setup` and `_trace_state`.
- `FrozenDict`, which its layers have as a default: the dictionary `_dict`.
- `TraceState`: the slot `_jax_trace`, which is `current_jax_trace()` where the object is made.

We check this instead of relying on a version. Each class must have NNX's own functions in JAX's registry, and exactly
these slots. NNX's functions are called on samples, and on one object of each `Layout`, and their results must be as
described. If anything differs, the registered functions are called. This file never imports Flax, and looks at it only
if the program has imported it.

In this file an attribute is *inherited* if the class or a base class has it; see `core._class_attributes.inherited`.
"""

import sys
import types
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ..core._class_attributes import built_in_base, dict_descriptor, inherited, is_data_descriptor
from ..core._jax_internals import rebuild_registered, registered_functions
from ..core._node_types import NativeLayout

STATE_SLOTS = ("_initializing", "_is_setup", "_trace_state")
VARIABLE_SLOTS = ("_raw_value", "_trace_state", "_var_metadata")
TRACE_SLOTS = ("_jax_trace",)
OWN = "_pytree__"
"""The prefix of the attributes that NNX itself sets on an object."""

NODES, MAPPING, INT_KEYS = OWN + "nodes", "_mapping", OWN + "has_int_keys"
STATE_FIELD = OWN + "state"


class Nnx(NamedTuple):
    """The classes and functions of NNX for the native walk.

    Attributes:
        pytree: the base class of all objects.
        variable: the base class of all variables.
        state: the class of an object's `_pytree__state`.
        trace: the class of a variable's `_trace_state`.
        mapping: the class of an object's `_pytree__nodes`.
        current_trace: returns the content of a new `TraceState`.
    """

    pytree: Any
    variable: Any
    state: Any
    trace: Any
    mapping: Any
    current_trace: Any


# Empty until NNX was imported. Then one item: its classes and functions, or None if NNX is not as described.
_cached: list[Nnx | None] = []


def nnx() -> Nnx | None:
    """Returns the classes and functions of NNX, if it was imported and is as described above. Otherwise None."""
    if not _cached:
        if "flax.nnx" not in sys.modules or not hasattr(sys.modules["flax.nnx"], "Module"):
            return None
        try:
            table = _look_up()
            _cached.append(table if _is_as_described(table) else None)
        except Exception:  # noqa: BLE001 -- whatever another version does
            _cached.append(None)
    return _cached[0]


def _look_up() -> Nnx:
    """Looks up the classes and functions in the modules of Flax.

    Raises:
        KeyError or AttributeError: if a module or a name is missing.
    """
    pytrees, variables = sys.modules["flax.nnx.pytreelib"], sys.modules["flax.nnx.variablelib"]
    traces, modules = sys.modules["flax.nnx.tracers"], sys.modules["flax.nnx"]
    return Nnx(
        pytree=pytrees.Pytree,
        variable=variables.Variable,
        state=pytrees.PytreeState,
        trace=traces.TraceState,
        mapping=type(modules.Module.__dict__[NODES]),
        current_trace=traces.current_jax_trace,
    )


def _slots_of(cls: Any) -> tuple[str, ...]:
    """Returns the names of all slots of the instances, sorted. A `__dict__` counts as a slot."""
    names = [name for base in cls.__mro__ for name in base.__dict__.get("__slots__", ())]
    return tuple(sorted(names + ["__dict__"] * bool(cls.__dictoffset__)))


def _is_as_described(table: Nnx) -> bool:
    """Checks the slots, and calls NNX's functions on a sample of each class. Returns True if all is as described."""
    # Slots.
    slots = _slots_of(table.state), _slots_of(table.trace), _slots_of(table.variable)
    if slots != (STATE_SLOTS, TRACE_SLOTS, VARIABLE_SLOTS) or _slots_of(table.mapping) != ("__dict__",):
        return False
    if vars(table.mapping({"a": True})) != {MAPPING: {"a": True}}:
        return False
    # A new trace state.
    trace = table.trace()
    if type(trace) is not table.trace or trace._jax_trace != table.current_trace():  # noqa: SLF001
        return False
    # A state: no children, the flags as auxiliary data, and a new trace after unflattening.
    flags, value = (object(), object()), object()
    state = _with_slots(table.state, dict(zip(STATE_SLOTS, (*flags, trace), strict=True)))
    children, aux = jtu.default_registry.flatten_one_level(state)
    rebuilt = rebuild_registered(table.state, aux, ())
    if (list(children), aux) != ([], flags) or not _has_slots(rebuilt, _initializing=flags[0], _is_setup=flags[1]):
        return False
    # A variable: its value as the child, and the sorted metadata as auxiliary data.
    variable = _with_slots(table.variable, {"_raw_value": value, "_var_metadata": {"b": 1, "a": 2}})
    children, aux = jtu.default_registry.flatten_one_level(variable)
    rebuilt = rebuild_registered(table.variable, aux, (value,))
    if (list(children), aux) != ([value], (("a", 2), ("b", 1))):
        return False
    return _has_slots(rebuilt, _raw_value=value, _var_metadata={"a": 2, "b": 1}) and type(rebuilt) is table.variable


def _with_slots(cls: Any, values: dict[str, Any]) -> Any:
    """Makes an instance with these values in its slots, without calling methods of the class."""
    obj = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(obj, name, value)
    return obj


def new_state(table: Nnx) -> Any:
    """Makes a `_pytree__state` for an object whose `__init__` has ended."""
    flags = dict.fromkeys(STATE_SLOTS, False)
    return _with_slots(table.state, flags | {"_trace_state": table.trace()})


def is_new_state(state: Any, table: Nnx) -> bool:
    """Returns True if both flags of a `_pytree__state` are False, as in a new one."""
    return type(state) is table.state and jtu.default_registry.flatten_one_level(state)[1] == (False, False)


def _has_slots(obj: Any, **expected: Any) -> bool:
    """Returns True if an object has these values in its slots, and a new trace in `_trace_state`."""
    trace = object.__getattribute__(obj, "_trace_state")
    table = _look_up()
    if type(trace) is not table.trace or trace._jax_trace != table.current_trace():  # noqa: SLF001
        return False
    return all(object.__getattribute__(obj, name) == value for name, value in expected.items())


def parts_of_frozen(value: Any) -> list[Any] | None:
    """Lists the content of a mapping never changed by Flax: a `FrozenDict`, or an object's `_pytree__nodes`.

    Returns:
        One list: key, value, key, value, and so on. None for any other value.
    """
    module = sys.modules.get("flax.core.frozen_dict")
    table = nnx()
    if table is not None and type(value) is table.mapping:
        content = getattr(value, MAPPING, None)
    elif type(value) is getattr(module, "FrozenDict", None):
        content = getattr(value, "_dict", None)
    else:
        return None
    return [part for item in content.items() for part in item] if type(content) is dict else None


def frozen_mapping(cls: Any) -> str | None:
    """Returns the attribute with the dictionary of a `HashableMapping`, such as the metadata in a `GraphDef`.

    None for any other class.
    """
    table = nnx()
    return MAPPING if table is not None and cls is table.mapping else None


class Facts(NamedTuple):
    """Facts about a class on which the native walk relies. It reads the class only as long as they stay equal.

    Attributes:
        role: "object", "variable" or "state".
        int_keys: the value of `_pytree__has_int_keys`. None for variables and states.
        descriptors: names of properties and other data descriptors of the class. An attribute must have no such name.
    """

    role: str
    int_keys: Any
    descriptors: frozenset[str]


def facts_of(cls: Any) -> Facts | None:
    """Returns the facts about a class. None for a class of other libraries, or one that C must not read.

    C must not read a class with flatten functions of its own, with a `__getattribute__`, or with other slots.
    """
    table = nnx()
    if table is None or not issubclass(cls, (table.pytree, table.variable, table.state)):
        return None
    flatten, unflatten = registered_functions(cls)
    if inherited(cls, "__getattribute__") is not object.__dict__["__getattribute__"]:
        return None
    if built_in_base(cls) is not object:
        return None
    if issubclass(cls, table.pytree):
        return _facts_of_object(cls, table.pytree, flatten, unflatten)
    home: Any = table.variable if issubclass(cls, table.variable) else table.state
    slots = VARIABLE_SLOTS if home is table.variable else STATE_SLOTS
    # The slots must be those of NNX's base class, and not attributes of a subclass with the same names.
    for name in slots:
        member = inherited(cls, name)
        if type(member) is not types.MemberDescriptorType or member.__objclass__ is not home:
            return None
    if home is table.state:
        return Facts("state", None, frozenset()) if cls is home else None
    # For each class of variables, NNX registers one flatten function, and a partial of one unflatten function.
    home_flatten, home_unflatten = registered_functions(home)
    function: Any = getattr(unflatten, "func", None)
    if flatten is not home_flatten or function is None or function is not getattr(home_unflatten, "func", None):
        return None
    if unflatten.args != (cls,) or unflatten.keywords:
        return None
    return Facts("variable", None, frozenset()) if inherited(cls, "_new") is home.__dict__["_new"] else None


def is_object(cls: Any) -> bool:
    """Returns True for a class of NNX's objects registered with NNX's own functions."""
    table = nnx()
    if table is None or table.pytree not in type.__getattribute__(cls, "__mro__"):
        return False
    flatten, unflatten = registered_functions(cls)
    return _are_of_nnx(cls, table.pytree, flatten, unflatten)


def _are_of_nnx(cls: Any, pytree: Any, flatten: Any, unflatten: Any) -> bool:
    """Returns True if the registered functions of a class are those of `Pytree`, the second as its class method."""
    has_unflatten = getattr(unflatten, "__func__", None) is pytree.__dict__["_pytree__unflatten"].__func__
    return flatten is pytree.__dict__["_pytree__flatten"] and has_unflatten and unflatten.__self__ is cls


def _facts_of_object(cls: Any, pytree: Any, flatten: Any, unflatten: Any) -> Facts | None:
    """Returns the facts about a class of objects. None if C must not read it."""
    if not _are_of_nnx(cls, pytree, flatten, unflatten):
        return None
    if type(dict_descriptor(cls)) is not types.GetSetDescriptorType:
        return None
    # In reverse, so that the class wins over its bases.
    class_attributes = {name: value for base in reversed(cls.__mro__) for name, value in base.__dict__.items()}
    descriptors = [name for name, value in class_attributes.items() if is_data_descriptor(value)]
    return Facts("object", class_attributes.get(INT_KEYS), frozenset(descriptors))


class Layout(NamedTuple):
    """The names of an object's attributes, and their order after NNX's flatten function.

    Attributes:
        form: the names of the children and of the static attributes, as the flatten function returns them, and the
            content of `_pytree__nodes`.
        names: all names, in the order of the `__dict__`.
        places: for each name, its index in the list of children and static attributes. -1 for `_pytree__nodes`.
        marked: the names in `_pytree__nodes`, in its order.
        marks: one byte for each name in `marked`, 1 if it is a child.
    """

    form: tuple[tuple[Any, ...], tuple[Any, ...], dict[str, bool]]
    names: tuple[str, ...]
    places: tuple[int, ...]
    marked: tuple[str, ...]
    marks: bytes


def layout_of(obj: Any) -> Layout | None:
    """Returns the layout of all objects with the class, the names and the marks of this one.

    It calls NNX's functions on the object, and checks that they return and set its attributes, and nothing else. If
    not, returns None, and the registered functions are called for all such objects.
    """
    cls: Any = type(obj)
    facts, table = facts_of(cls), nnx()
    if facts is None or table is None:
        return None
    attributes = dict_descriptor(cls).__get__(obj)
    mapping = attributes.get(NODES) if type(attributes) is dict else None
    if type(mapping) is not table.mapping or type(getattr(mapping, MAPPING)) is not dict:
        return None
    marks: dict[Any, Any] = getattr(mapping, MAPPING)
    are_texts = all(type(name) is str for name in (*attributes, *marks))
    if not are_texts or not all(type(mark) is bool for mark in marks.values()):
        return None
    # An attribute that hides the class's own, or that a property of the class would answer for.
    if INT_KEYS in attributes or not facts.descriptors.isdisjoint(attributes):
        return None
    # The names and values that NNX's flatten function returns: the children first.
    children, aux = jtu.default_registry.flatten_one_level(obj)
    nodes, statics, values = aux
    if {type(key) for key in (*nodes, *statics)} - {str, int} or NODES not in statics:
        return None
    order = [str(key) for key in (*nodes, *statics)]
    expected = list(zip(order, (*children, *values), strict=True))
    # The inverse must set the attributes in the order of children and static attributes.
    rebuilt = dict_descriptor(cls).__get__(rebuild_registered(cls, aux, children))
    if not _are_same(expected, list(rebuilt.items())) or len(order) != len(attributes):
        return None
    if not _are_same(sorted(expected, key=_name), sorted(attributes.items(), key=_name)):
        return None
    places = {name: place for place, name in enumerate(order)} | {NODES: -1}
    return Layout(
        form=(nodes, statics, dict(marks)),
        names=tuple([sys.intern(name) for name in attributes]),
        places=tuple([places[name] for name in attributes]),
        marked=tuple([sys.intern(name) for name in marks]),
        marks=bytes(marks.values()),
    )


def _name(item: tuple[str, Any]) -> str:
    """Returns the name in a pair of name and value, to sort by."""
    return item[0]


def _are_same(left: list[tuple[str, Any]], right: list[tuple[str, Any]]) -> bool:
    """Returns True if two lists have equal names and the same values (by `is`) in the same order."""
    return len(left) == len(right) and all(a == b and x is y for (a, x), (b, y) in zip(left, right, strict=True))


def native_layout_of(cls: Any) -> NativeLayout | None:
    """Returns the layout of a class for the native walk, with the facts on which it relies. None if there is none."""
    facts = facts_of(cls)
    if facts is None:
        return None
    names = {"object": (), "variable": VARIABLE_SLOTS, "state": STATE_SLOTS}[facts.role]
    slots = tuple([inherited(cls, name) for name in names])
    layout = NativeLayout(f"NNX_{facts.role.upper()}", slots=slots, facts=facts)
    if facts.role != "state":
        return layout
    # A state has two static flags. Its trace, the last slot, is not flattened.
    flags = slots[:2]
    # Order of the fields, which are static, their places, traced fields, static fields: see `_dataclasses.Fields`.
    return layout._replace(fields=(flags, bytes((1, 1)), bytes((0, 1)), (), flags))


def introduce(native: Any) -> None:
    """Tells the native walk NNX's classes and slots. It is called once NNX was imported, which may be at any time."""
    table = nnx()
    assert table is not None
    homes = (table.variable, VARIABLE_SLOTS), (table.state, STATE_SLOTS[2:]), (table.trace, TRACE_SLOTS)
    slots = [vars(home)[name] for home, names in homes for name in names]
    attribute_names = map(sys.intern, (NODES, MAPPING))
    native.take_over("nnx", layout_of, table.mapping, table.trace, table.current_trace, *attribute_names, *slots)
