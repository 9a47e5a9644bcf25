"""What the native walk is told of each class: once, when it first meets an instance.

What is told holds for ever, as `NodeType`s do; but that of a class that is no node only until another class is
registered as one, for that may be it.
"""

import collections
import dataclasses
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util as jtu
from jax.core import Tracer

from ._arguments import Arguments
from ._attribute_kinds import KINDS_SLOT, HasKinds, Kinds, is_read_by_kinds
from ._dataclass_fields import Fields, fields_of
from ._engine import native
from ._equinox_internals import marker_type
from ._interned import Interned
from ._jax_internals import REGISTRY, ConcreteArray
from ._nnx_internals import (
    MAPPING,
    NODES,
    STATE_SLOTS,
    TRACE_SLOTS,
    VARIABLE_SLOTS,
    Facts,
    facts_of,
    layout_of,
    nnx,
)
from ._node_types import (
    NUMPY_NUMBERS,
    TRACED_NUMBERS,
    Inherited,
    NodeType,
    built_in_base,
    carries_identity,
    dict_descriptor,
    is_namedtuple,
    is_registered,
    is_traced,
    is_value_of_variable,
    node_type_of,
    node_type_of_class,
    when_registered,
)
from ._static_keys import Known, key_of, nothing_known
from ._statics import Settled, Static, cannot_change, is_known_by_address
from ._structure import LEAF, Given, Node, Record, Update

Description = tuple[Any, ...]

_NO_FIELDS = ((), b"", b"", (), ())

_MODULE = "module"
_MODULE_SLOTS: tuple[tuple[type, str], ...] = ((HasKinds, KINDS_SLOT), (Kinds, "names"), (Kinds, "are_static"))

_read_by_field: dict[type, Fields | Facts | str] = {}
"""What holds of each class that is read field by field as long as nobody changes it."""


def _leaf(cls: type, shape: int, *, is_guess: bool = False) -> Description:
    return (cls, shape, False, False, False, native.INHERITED, False, is_guess, None, None, *_NO_FIELDS)


def _described(node_type: NodeType) -> Description:
    """The arguments of `new_kind` in `_native.c`."""
    convention = native.INHERITED if node_type.convention is None else _NUMBERS[node_type.convention]
    shape, take_apart = _shape_of(node_type), node_type.take_apart
    is_rebuilt = shape in (*_SHAPES.values(), native.FIELDS, native.NAMEDTUPLE)
    fields = _fields_of(node_type) if shape == native.FIELDS else _NO_FIELDS
    if is_registered(node_type):
        take_apart, is_rebuilt = jtu.default_registry.flatten_one_level, True
        found = _facts_of(node_type.cls)
        if found is not None:
            _read_by_field[node_type.cls] = found
        if isinstance(found, Fields):
            *fields, are_slots = found
            shape = native.SLOTS if are_slots else native.DATACLASS
        elif found == _MODULE:
            shape = native.MODULE
        elif isinstance(found, Facts):
            _introduce_nnx()
            shape = getattr(native, f"NNX_{found.role.upper()}")
            fields = _fields_of_state(node_type.cls) if shape == native.NNX_STATE else _NO_FIELDS
    facts = node_type.is_plain, node_type.is_mutable, node_type.is_known_to_jax, convention, is_rebuilt
    # What is told must not keep a namedtuple alive, as its node type would.
    told = None if shape == native.NAMEDTUPLE else node_type
    return (node_type.cls, shape, *facts, False, told, take_apart, *fields)


def _facts_of(cls: type) -> Fields | Facts | str | None:
    if is_read_by_kinds(cls):
        return _MODULE
    return fields_of(cls) or facts_of(cls)


def _introduce_nnx() -> None:
    """Tells the native walk of NNX, which may be imported at any time."""
    table = nnx()
    assert table is not None
    slots = [table.variable.__dict__[name] for name in VARIABLE_SLOTS]
    slots += [table.state.__dict__[name] for name in STATE_SLOTS] + [table.trace.__dict__[name] for name in TRACE_SLOTS]
    names = map(sys.intern, (NODES, MAPPING))
    native.learn_nnx(layout_of, table.mapping, table.trace, table.current_trace, *names, *slots)


def _fields_of_state(cls: type) -> Description:
    """Its flags, both static, by the descriptors of their slots; the trace, which comes last, takes no part."""
    flags = tuple([vars(cls)[name] for name in STATE_SLOTS[:2]])
    return flags, bytes((1, 1)), bytes((0, 1)), (), flags


def look_again(records: Sequence[Record]) -> None:
    """Leaves to JAX those classes in a new structure that were changed since they were met."""
    for cls in {op.type.cls for op, _ in records if type(op) is Node}:
        known = _read_by_field.get(cls)
        if known is not None and _facts_of(cls) != known:
            native.unlearn(cls)
            _read_by_field.pop(cls, None)


def _shape_of(node_type: NodeType) -> int:
    cls = node_type.cls
    if cls in _SHAPES:
        return _SHAPES[cls]
    if cls is Arguments:
        return native.ARGUMENTS
    if node_type.is_plain and is_namedtuple(cls):
        return native.NAMEDTUPLE
    return native.FIELDS if node_type.fields and _is_an_ordinary_object(cls) else native.OTHER


_SHAPES: dict[type, int] = {}
"""Of the containers that are put together by their classes."""


def _is_an_ordinary_object(cls: type) -> bool:
    """Whether `object.__new__` makes its instances, with their attributes in the dictionary that every object has."""
    return built_in_base(cls) is object and type(dict_descriptor(cls)) is types.GetSetDescriptorType


def _fields_of(node_type: NodeType) -> Description:
    """In the order of the fields; and all names, of what is traced and of what is static, as `NodeType` has them."""
    fields = [(field.name, field.metadata.get("static", False)) for field in dataclasses.fields(node_type.cls)]
    statics = frozenset(name for name, is_static in fields if is_static)
    declared = tuple([sys.intern(name) for name, _ in fields])
    traced = tuple([name for name in declared if name not in statics])
    rest = tuple([sys.intern(name) for name in node_type.fields[len(traced) :]])
    return declared, bytes(name in statics for name in declared), b"", traced, rest


def _meet(obj: Any, number: int) -> Description | int:
    """What the class of an object is, or for a leaf: 0 if it is static, 1 if it is a value, 2 if it has identity.

    Args:
        obj: the object.
        number: that of the convention, and beyond eight bits whether only arrays are traced.
    """
    convention, filtered = _CONVENTIONS[number & 0xFF], bool(number >> 8)
    # Met at every leaf of every trace. Their class has no kind, for it does not tell an array from a reference.
    if isinstance(obj, (Tracer, jax.Ref)):
        return _role(obj, convention, filtered=filtered)
    node_type = node_type_of(obj)
    if node_type is not None and (convention not in ("outside", "any") or node_type.is_known_to_jax):
        return _described(node_type)
    cls = type(obj)
    if node_type is not None:
        return _role(obj, convention, filtered=filtered)
    if issubclass(cls, jax.Array):
        return _leaf(cls, native.JAX_ARRAY)  # such as that of PRNG keys
    if isinstance(obj, jax.ShapeDtypeStruct):
        return _leaf(cls, native.JAX_ARRAY, is_guess=True)
    if issubclass(cls, (np.ndarray, np.generic)):  # of what is no number
        return _role(obj, convention, filtered=filtered)
    shape = native.NUMBER if is_traced(obj, "jax") else native.STATIC
    return _leaf(cls, shape, is_guess=True)


def _role(leaf: Any, convention: Inherited, *, filtered: bool) -> int:
    if not is_traced(leaf, convention) or (filtered and not is_traced(leaf, "equinox")):
        return 0
    is_value = not carries_identity(leaf) or (convention == "variable" and is_value_of_variable(leaf))
    return 1 if is_value or (convention == "outside" and not isinstance(leaf, jax.Ref)) else 2


class Token:
    """Stands for a static value in a key. Equal values have one token, as long as a structure has it."""

    __slots__ = ("__weakref__", "_key")

    def __init__(self, key: Any) -> None:
        self._key = key

    def complete(self) -> None:
        """Nothing follows from it."""

    def is_like(self, other: "Token") -> bool:
        """Whether another one stands for the same value."""
        return self._key == other._key


_tokens: Interned[Token] = Interned()


class _Met(weakref.ref[Any]):
    """A value that can be mutated, while it lives, and the token that it had when it was last met."""

    __slots__ = ("address", "token")

    address: int
    token: "weakref.ref[Token]"


_latest: dict[int, _Met] = {}
"""Those values, by id."""


def _let_go_of(met: Any, latest: dict[int, _Met] = _latest) -> None:
    if latest.get(met.address) is met:
        latest.pop(met.address, None)


def _settle(values: list[Any]) -> list[Any]:
    """What stands for each static value of a walk in a key.

    A tuple of its class, if all instances of that are known by address; otherwise its token, in a tuple with None if
    the value is the same for ever.
    """
    known, settled = nothing_known(), Settled()
    found: dict[int, Any] = {}
    for value in values:
        if id(value) not in found:  # alive in `values`
            found[id(value)] = _settled(value, known, settled)  # as above
    return [found[id(value)] for value in values]  # as above


def _settled(value: Any, known: Known, settled: Settled) -> Any:
    cls = type(value)
    key, is_mutable = key_of(value, known)
    if not is_mutable and is_known_by_address(cls) and not issubclass(cls, (tuple, frozenset, slice)):
        return (cls,)
    if cannot_change(value, settled):
        return _tokens.one_like(hash(key), Token(key)), None
    token = Token(key)
    # Of values without a hash there may be many that are to be compared with, and most are as they were.
    met = _latest.get(id(value))  # alive while the entry is there
    before = met.token() if met is not None and met() is value else None
    if before is not None and before.is_like(token):
        return before
    token = _tokens.one_like(hash(key), token)
    try:
        met = _Met(value, _let_go_of)
    except TypeError:  # it cannot be referred to weakly
        return token
    met.address, met.token = id(value), weakref.ref(token)
    _latest[id(value)] = met  # as above
    return token


_CONVENTIONS: dict[int, Inherited] = {}
_NUMBERS: dict[Inherited, int] = {}
"""The inverse."""


def start(entries: dict[bytes, Any]) -> bool:
    """Tells the native walk what it has to know. False if it serves an earlier import of the package.

    Args:
        entries: key → weak reference to its structure.
    """
    numbers: dict[Inherited, int] = {"jax": native.JAX, "equinox": native.EQUINOX, "any": native.ANY}
    numbers |= {"outside": native.OUTSIDE, "variable": native.IN_VARIABLE}
    _NUMBERS.update(numbers)
    _CONVENTIONS.update({number: convention for convention, number in _NUMBERS.items()})
    _SHAPES.update(
        {type(None): native.NOTHING, tuple: native.TUPLE, list: native.LIST, dict: native.DICT}
        | {collections.OrderedDict: native.ORDERED_DICT, collections.defaultdict: native.DEFAULT_DICT}
        | {collections.deque: native.DEQUE}
    )
    dtypes = tuple(map(np.dtype, NUMPY_NUMBERS))
    ops = Node, Static, Given, Update
    if not native.start(entries, _meet, _described, _settle, marker_type(), LEAF, *ops, dtypes, REGISTRY):
        return False
    when_registered.append(native.look_again)
    native.learn_modules(Kinds, *[vars(of)[name] for of, name in _MODULE_SLOTS])
    for cls in TRACED_NUMBERS:
        native.learn(_leaf(cls, native.NUMBER))
    for cls in NUMPY_NUMBERS:
        native.learn(_leaf(cls, native.NUMPY_NUMBER))
    for cls in {str, bytes, types.FunctionType, types.BuiltinFunctionType, type(jax.nn.relu), type(jax.nn.gelu)}:
        native.learn(_leaf(cls, native.STATIC))
    native.learn(_leaf(np.ndarray, native.NUMPY_ARRAY))
    native.learn(_leaf(ConcreteArray, native.JAX_ARRAY))
    # Its class does not say that it is a container, which has to be known of the static attributes of modules.
    native.learn(_described(node_type_of_class(collections.deque)))
    return True
