"""What Flax NNX does not promise: how its objects hold what their flatten functions give. What it promises: `_nnx.py`.

The registered functions of NNX are Python, so each module, variable and state costs microseconds in either direction.
Reading and setting the same attributes in C gives the same, as long as these names stand for what they do in Flax 0.12:

- `Pytree`: what an object has is its `__dict__`, in which `_pytree__nodes` is a `HashableMapping` (over the dictionary
  `_mapping`) from names to whether they are children. `_pytree__has_int_keys` says whether names are read as numbers.
- `Variable`: the slots `_raw_value`, `_var_metadata` (a dictionary, sorted in the flatten) and `_trace_state`. Its
  hooks are not run.
- `PytreeState`: the slots `_initializing`, `_is_setup` and `_trace_state`.
- `FrozenDict`, which its layers have as a default: the dictionary `_dict`.
- `TraceState`: the slot `_jax_trace`, which is `current_jax_trace()` where the object is made.

Nothing here is believed because of a version. Each class must have NNX's own functions in JAX's registry, the slots
must be exactly these, and what NNX's functions make of samples is compared with what is said above, for each form that
an object's attributes have, too. Where anything differs, the registered functions are called as ever. Flax is not
imported, only looked at if the program has done so.
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
"""Begins the names of what a `Pytree` keeps for itself."""

NODES, MAPPING, INT_KEYS = OWN + "nodes", "_mapping", OWN + "has_int_keys"
STATE_FIELD = OWN + "state"


class Nnx(NamedTuple):
    """What of NNX the native walk is told.

    Attributes:
        pytree: the class of all objects.
        variable: the class of all variables.
        state: the class of what an object has as its `_pytree__state`.
        trace: the class of what a variable has as its `_trace_state`.
        mapping: the class of what an object has as its `_pytree__nodes`.
        current_trace: what a new `TraceState` holds.
    """

    pytree: Any
    variable: Any
    state: Any
    trace: Any
    mapping: Any
    current_trace: Any


_found: list[Nnx | None] = []  # at most one, once NNX was imported


def nnx() -> Nnx | None:
    """NNX if it was imported and is as described above."""
    if not _found:
        if "flax.nnx" not in sys.modules or not hasattr(sys.modules["flax.nnx"], "Module"):
            return None
        try:
            table = _look_up()
            _found.append(table if _is_as_described(table) else None)
        except Exception:  # noqa: BLE001 -- whatever another version does
            _found.append(None)
    return _found[0]


def _look_up() -> Nnx:
    pytrees, variables = sys.modules["flax.nnx.pytreelib"], sys.modules["flax.nnx.variablelib"]
    traces, modules = sys.modules["flax.nnx.tracers"], sys.modules["flax.nnx"]
    return Nnx(
        pytrees.Pytree,
        variables.Variable,
        pytrees.PytreeState,
        traces.TraceState,
        type(modules.Module.__dict__[NODES]),
        traces.current_jax_trace,
    )


def _slots_of(cls: Any) -> tuple[str, ...]:
    """All slots of the instances; their `__dict__` is one."""
    found = [name for base in cls.__mro__ for name in base.__dict__.get("__slots__", ())]
    return tuple(sorted(found + ["__dict__"] * bool(cls.__dictoffset__)))


def _is_as_described(table: Nnx) -> bool:
    """Asks NNX's functions about a state, a trace and a variable."""
    slots = _slots_of(table.state), _slots_of(table.trace), _slots_of(table.variable)
    if slots != (STATE_SLOTS, TRACE_SLOTS, VARIABLE_SLOTS) or _slots_of(table.mapping) != ("__dict__",):
        return False
    if vars(table.mapping({"a": True})) != {MAPPING: {"a": True}}:
        return False
    trace = table.trace()
    if type(trace) is not table.trace or trace._jax_trace != table.current_trace():  # noqa: SLF001
        return False
    flags, value = (object(), object()), object()
    state = _with_slots(table.state, dict(zip(STATE_SLOTS, (*flags, trace), strict=True)))
    children, aux = jtu.default_registry.flatten_one_level(state)
    made = rebuild_registered(table.state, aux, ())
    if (list(children), aux) != ([], flags) or not _has_slots(made, _initializing=flags[0], _is_setup=flags[1]):
        return False
    variable = _with_slots(table.variable, {"_raw_value": value, "_var_metadata": {"b": 1, "a": 2}})
    children, aux = jtu.default_registry.flatten_one_level(variable)
    made = rebuild_registered(table.variable, aux, (value,))
    if (list(children), aux) != ([value], (("a", 2), ("b", 1))):
        return False
    return _has_slots(made, _raw_value=value, _var_metadata={"a": 2, "b": 1}) and type(made) is table.variable


def _with_slots(cls: Any, values: dict[str, Any]) -> Any:
    obj = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(obj, name, value)
    return obj


def new_state(table: Nnx) -> Any:
    """What an object that was made and is complete has as its `_pytree__state`."""
    flags = dict.fromkeys(STATE_SLOTS, False)
    return _with_slots(table.state, flags | {"_trace_state": table.trace()})


def is_new_state(state: Any, table: Nnx) -> bool:
    """Whether a `_pytree__state` says no more than a new one."""
    return type(state) is table.state and jtu.default_registry.flatten_one_level(state)[1] == (False, False)


def _has_slots(obj: Any, **expected: Any) -> bool:
    """Whether an object has these values in its slots, and a new trace in the one that is left."""
    trace = object.__getattribute__(obj, "_trace_state")
    table = _look_up()
    if type(trace) is not table.trace or trace._jax_trace != table.current_trace():  # noqa: SLF001
        return False
    return all(object.__getattribute__(obj, name) == value for name, value in expected.items())


def parts_of_frozen(value: Any) -> list[Any] | None:
    """Lists what a value holds that Flax never changes: a `FrozenDict`, or the names of an object's children.

    Returns:
        The keys and the values; None for any other value.
    """
    module = sys.modules.get("flax.core.frozen_dict")
    table = nnx()
    if table is not None and type(value) is table.mapping:
        held = getattr(value, MAPPING, None)
    elif type(value) is getattr(module, "FrozenDict", None):
        held = getattr(value, "_dict", None)
    else:
        return None
    return [part for item in held.items() for part in item] if type(held) is dict else None


class Facts(NamedTuple):
    """What has to hold of a class for it to be read and built in C, and has to go on holding.

    Attributes:
        role: "object", "variable" or "state".
        int_keys: whether names are read as numbers.
        descriptors: the names under which the class has something that answers for an attribute.
    """

    role: str
    int_keys: Any
    descriptors: frozenset[str]


def facts_of(cls: Any) -> Facts | None:
    """What holds of a class of NNX; None for all others, and for those with functions of their own."""
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
    found = [inherited(cls, name) for name in slots]
    if any(type(each) is not types.MemberDescriptorType or each.__objclass__ is not home for each in found):
        return None
    if home is table.state:
        return Facts("state", None, frozenset()) if cls is home else None
    their_flatten, their_unflatten = registered_functions(home)
    own: Any = getattr(unflatten, "func", None)
    if flatten is not their_flatten or own is None or own is not getattr(their_unflatten, "func", None):
        return None
    if unflatten.args != (cls,) or unflatten.keywords:
        return None
    return Facts("variable", None, frozenset()) if inherited(cls, "_new") is home.__dict__["_new"] else None


def is_object(cls: Any) -> bool:
    """Whether a class is one of NNX's objects, and JAX takes its instances apart by the functions of NNX."""
    table = nnx()
    if table is None or table.pytree not in type.__getattribute__(cls, "__mro__"):
        return False
    flatten, unflatten = registered_functions(cls)
    return _are_of_nnx(cls, table.pytree, flatten, unflatten)


def _are_of_nnx(cls: Any, pytree: Any, flatten: Any, unflatten: Any) -> bool:
    own = getattr(unflatten, "__func__", None) is pytree.__dict__["_pytree__unflatten"].__func__
    return flatten is pytree.__dict__["_pytree__flatten"] and own and unflatten.__self__ is cls


def _facts_of_object(cls: Any, pytree: Any, flatten: Any, unflatten: Any) -> Facts | None:
    if not _are_of_nnx(cls, pytree, flatten, unflatten):
        return None
    if type(dict_descriptor(cls)) is not types.GetSetDescriptorType:
        return None
    found = {name: value for base in reversed(cls.__mro__) for name, value in base.__dict__.items()}
    data = [name for name, value in found.items() if is_data_descriptor(value)]
    return Facts("object", found.get(INT_KEYS), frozenset(data))


class Layout(NamedTuple):
    """The names that an object has, and what its flatten makes of them.

    Attributes:
        form: the names of its children, and of what is static, as its flatten has them; and what `_pytree__nodes` maps.
        names: in the order of its `__dict__`.
        places: of each, its place among the children and then the static ones; -1 for `_pytree__nodes`.
        marked: the names in `_pytree__nodes`, in its order.
        marks: of each of these, whether it is a child.
    """

    form: tuple[tuple[Any, ...], tuple[Any, ...], dict[str, bool]]
    names: tuple[str, ...]
    places: tuple[int, ...]
    marked: tuple[str, ...]
    marks: bytes


def layout_of(obj: Any) -> Layout | None:
    """What holds of all objects of this class with these names and marks; None if their flatten has to be called."""
    cls: Any = type(obj)
    facts, table = facts_of(cls), nnx()
    if facts is None or table is None:
        return None
    attributes = dict_descriptor(cls).__get__(obj)
    mapping = attributes.get(NODES) if type(attributes) is dict else None
    if type(mapping) is not table.mapping or type(getattr(mapping, MAPPING)) is not dict:
        return None
    marks: dict[Any, Any] = getattr(mapping, MAPPING)
    if not all(type(name) is str for name in (*attributes, *marks)) or not all(type(x) is bool for x in marks.values()):
        return None
    if INT_KEYS in attributes or not facts.descriptors.isdisjoint(attributes):
        return None
    children, aux = jtu.default_registry.flatten_one_level(obj)
    nodes, statics, values = aux
    if {type(key) for key in (*nodes, *statics)} - {str, int} or NODES not in statics:
        return None
    order = [str(key) for key in (*nodes, *statics)]
    expected = list(zip(order, (*children, *values), strict=True))
    made = dict_descriptor(cls).__get__(rebuild_registered(cls, aux, children))
    if not _are_same(expected, list(made.items())) or len(order) != len(attributes):
        return None
    if not _are_same(sorted(expected, key=_name), sorted(attributes.items(), key=_name)):
        return None
    places = {name: place for place, name in enumerate(order)} | {NODES: -1}
    return Layout(
        (nodes, statics, dict(marks)),
        tuple([sys.intern(name) for name in attributes]),
        tuple([places[name] for name in attributes]),
        tuple([sys.intern(name) for name in marks]),
        bytes(marks.values()),
    )


def _name(item: tuple[str, Any]) -> str:
    return item[0]


def _are_same(items: list[tuple[str, Any]], others: list[tuple[str, Any]]) -> bool:
    return len(items) == len(others) and all(a == b and x is y for (a, x), (b, y) in zip(items, others, strict=True))


def native_layout_of(cls: Any) -> NativeLayout | None:
    """How the native walk reads a class, and what it takes for granted of it."""
    facts = facts_of(cls)
    if facts is None:
        return None
    names = {"object": (), "variable": VARIABLE_SLOTS, "state": STATE_SLOTS}[facts.role]
    slots = tuple([inherited(cls, name) for name in names])
    layout = NativeLayout(f"NNX_{facts.role.upper()}", slots=slots, facts=facts)
    if facts.role != "state":
        return layout
    # Its flags, both static; the trace, which comes last, takes no part.
    flags = slots[:2]
    return layout._replace(fields=(flags, bytes((1, 1)), bytes((0, 1)), (), flags))


def introduce(native: Any) -> None:
    """Where objects, variables and states have what they are made of. NNX may be imported at any time."""
    table = nnx()
    assert table is not None
    homes = (table.variable, VARIABLE_SLOTS), (table.state, STATE_SLOTS[2:]), (table.trace, TRACE_SLOTS)
    slots = [vars(home)[name] for home, names in homes for name in names]
    own = map(sys.intern, (NODES, MAPPING))
    native.take_over("nnx", layout_of, table.mapping, table.trace, table.current_trace, *own, *slots)
