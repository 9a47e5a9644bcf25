"""What the native walk is told of each class: once, when it first meets an instance.

What is told holds for ever, as `NodeType`s do; but that of a class that is no node only until another class is
registered as one, for that may be it.
"""

import collections
import contextlib
import types
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util as jtu
from jax.core import Tracer

from ._by_identity import IdentityDict, WeakIdentityDict
from ._call_arguments import Arguments
from ._interned_objects import Interned
from ._jax_internals import REGISTRY, ConcreteArray
from ._library_rows import LIBRARIES, NativeLayout, native_layout_of
from ._native_or_python import native
from ._node_types import is_registered, is_value_of_variable, node_type_of, node_type_of_class, when_registered
from ._plain_containers import Inherited, NodeType, is_namedtuple
from ._static_kinds import Looked, cannot_change, is_known_by_address
from ._static_values import Known, Static, key_of, nothing_known
from ._structure import LEAF, Given, Node, Record, Update
from ._traced_leaves_and_identity import NUMPY_NUMBERS, TRACED_NUMBERS, carries_identity, is_traced

Description = tuple[Any, ...]

_NO_FIELDS = NativeLayout("").fields

_read_natively: dict[type, NativeLayout] = {}
"""How each class is read past the functions that were registered, as long as nobody changes it."""

_introduced: set[str] = set()
"""The libraries that the native walk was told of."""


def _leaf(cls: type, shape: int, *, is_guess: bool = False) -> Description:
    return (cls, shape, False, False, False, native.INHERITED, False, is_guess, None, None, *_NO_FIELDS)


def _described(node_type: NodeType) -> Description:
    """The arguments of `new_kind` in `_native.c`."""
    convention = native.INHERITED if node_type.convention is None else _NUMBERS[node_type.convention]
    shape, take_apart, fields = _shape_of(node_type), node_type.take_apart, _NO_FIELDS
    found = native_layout_of(node_type.cls) if is_registered(node_type) or node_type.fields else None
    if found is not None:
        library, layout = found
        if library.name not in _introduced:
            library.introduce(native)
            _introduced.add(library.name)
        shape, fields = getattr(native, layout.shape), layout.fields
        if is_registered(node_type):
            _read_natively[node_type.cls] = layout
    is_rebuilt = shape not in (native.OTHER, native.ARGUMENTS)
    if is_registered(node_type):
        take_apart, is_rebuilt = jtu.default_registry.flatten_one_level, True
    facts = node_type.is_plain, node_type.is_mutable, node_type.is_known_to_jax, convention, is_rebuilt
    # What is told must not keep a namedtuple alive, as its node type would.
    told = None if shape == native.NAMEDTUPLE else node_type
    return (node_type.cls, shape, *facts, False, told, take_apart, *fields)


def look_again(records: Sequence[Record]) -> None:
    """Leaves to JAX those classes in a new structure that were changed since they were met."""
    for cls in {op.type.cls for op, _ in records if type(op) is Node}:
        known = _read_natively.get(cls)
        if known is None:
            continue
        found = native_layout_of(cls)
        if found is None or found[1] != known:
            native.unlearn(cls)
            _read_natively.pop(cls, None)


def _shape_of(node_type: NodeType) -> int:
    cls = node_type.cls
    if cls in _SHAPES:
        return _SHAPES[cls]
    if cls is Arguments:
        return native.ARGUMENTS
    if node_type.is_plain and is_namedtuple(cls):
        return native.NAMEDTUPLE
    return native.OTHER


_SHAPES: dict[type, int] = {}
"""Of the containers that are put together by their classes."""


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


_latest: WeakIdentityDict["weakref.ref[Token]"] = WeakIdentityDict()
"""Of values that can be mutated, the token that each had when it was last met."""


def _settle(values: list[Any]) -> list[Any]:
    """What stands for each static value of a walk in a key.

    A tuple of its class, if all instances of that are known by address; otherwise its token, in a tuple with None if
    the value is the same for ever.
    """
    known = nothing_known()
    settled: IdentityDict[Looked] = IdentityDict()
    found: IdentityDict[Any] = IdentityDict()
    for value in values:
        if value not in found:
            found[value] = _settled(value, known, settled)
    return [found[value] for value in values]


def _settled(value: Any, known: Known, settled: IdentityDict[Looked]) -> Any:
    cls = type(value)
    key, is_mutable = key_of(value, known)
    if not is_mutable and is_known_by_address(cls) and not issubclass(cls, (tuple, frozenset, slice)):
        return (cls,)
    if cannot_change(value, settled):
        return _tokens.one_like(hash(key), Token(key)), None
    token = Token(key)
    # Of values without a hash there may be many that are to be compared with, and most are as they were.
    met = _latest.get(value)
    before = None if met is None else met()
    if before is not None and before.is_like(token):
        return before
    token = _tokens.one_like(hash(key), token)
    with contextlib.suppress(TypeError):  # it cannot be referred to weakly
        _latest[value] = weakref.ref(token)
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
    (marker,) = [library.marker for library in LIBRARIES if library.marker is not None] or [None]
    if not native.start(entries, _meet, _described, _settle, marker, LEAF, *ops, dtypes, REGISTRY):
        return False
    when_registered.append(native.look_again)
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
