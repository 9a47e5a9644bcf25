"""The kinds of static value: what each is compared by, how it is copied, and whether it stays the same for ever.

Nobody can change what was compared, for whatever in a value can be mutated is copied, and the rest is shared with the
original. One object in a value is one object in its copy, so a copy takes as long as there are objects, however many
paths lead to them.
"""

import collections
import copy
import functools
import struct
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._by_identity import IdentityDict
from ._class_attributes import dataclass_fields
from ._library_rows import compares_by_parts, parts_of_frozen
from ._plain_containers import is_namedtuple


class _Facts(tuple[Any, ...]):
    """What is compared by its own `==`, and not part by part: the dtype, the shape and the bytes of an array."""

    __slots__ = ()


BY_VALUE = frozenset({bool, int, str, bytes, type(None), type(...), type(NotImplemented), _Facts})
"""The types whose instances are alike exactly if they have the same type and are equal."""

_IMMUTABLE = BY_VALUE | {float, complex, type, range}
_FIXED = (type, np.dtype, jax.sharding.PartitionSpec, jax.sharding.Sharding, jax.sharding.Mesh)  # and all their kinds


class Incomparable(Exception):  # noqa: N818 -- never leaves the package; the walk adds the path
    """A value, or something in it, has no usable `==`, or cannot be hashed or copied."""

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(f"`{type(value).__qualname__}`: {reason}")
        self.value = value
        self.reason = reason


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    except Exception as error:  # noqa: BLE001 -- whatever a user's __hash__ raises
        raise Incomparable(value, f"taking its hash raised {type(error).__name__}: {error}") from None
    return True


class _Container(NamedTuple):
    """One kind of container.

    Attributes:
        is_mutable: whether an instance can be changed.
        parts: instance → the values that it is compared by, beside its class.
        copied: (instance, how a part is copied) → a copy.
        is_ordered: whether the order of the parts counts.
    """

    is_mutable: bool
    parts: Callable[[Any], Collection[Any]]
    copied: Callable[[Any, Callable[[Any], Any]], Any]
    is_ordered: bool = True


def _itself(value: Any, _: Any = None) -> Any:
    return value


def _copied_parts(value: Any, each: Callable[[Any], Any]) -> Any:
    return type(value)([each(part) for part in value])


def _items_of(value: dict[Any, Any]) -> list[Any]:
    """The keys and the values, in order, since whoever gets the dictionary can see that too."""
    return [*value.keys(), *value.values()]


def _copied_items(value: Any, each: Callable[[Any], Any]) -> Any:
    return type(value)([(key, each(part)) for key, part in value.items()])


def _parts_of_array(value: np.ndarray[Any, Any]) -> list[Any]:
    if value.dtype.hasobject:
        return [_Facts((value.dtype, value.shape)), *value.ravel().tolist()]
    return [_Facts((value.dtype, value.shape, value.tobytes()))]


_CONTAINERS: dict[type, _Container] = {
    tuple: _Container(False, _itself, _copied_parts),
    frozenset: _Container(False, _itself, _itself, is_ordered=False),
    slice: _Container(
        False,
        lambda value: (value.start, value.stop, value.step),
        lambda value, each: slice(each(value.start), each(value.stop), each(value.step)),
    ),
    functools.partial: _Container(
        False,
        lambda value: [value.func, value.args, *_items_of(value.keywords)],
        lambda value, each: functools.partial(each(value.func), *each(value.args), **each(value.keywords)),
    ),
    list: _Container(True, _itself, _copied_parts),
    collections.OrderedDict: _Container(True, _items_of, _copied_items),
    collections.defaultdict: _Container(
        True,
        lambda value: [value.default_factory, *_items_of(value)],
        lambda value, each: type(value)(value.default_factory, _copied_items(dict(value), each)),
    ),
    dict: _Container(True, _items_of, _copied_items),
    set: _Container(True, _itself, _copied_parts, is_ordered=False),
    bytearray: _Container(True, lambda value: [bytes(value)], lambda value, _: value.copy()),
    collections.deque: _Container(
        True,
        lambda value: [value.maxlen, *value],
        lambda value, each: type(value)([each(part) for part in value], value.maxlen),
    ),
    np.ndarray: _Container(True, _parts_of_array, lambda value, _: value.copy()),
}
"""Subclasses stand before their bases."""

_WITH_SUBCLASSES = tuple([cls for cls in _CONTAINERS if cls is not functools.partial])
_MUTABLE = tuple([cls for cls, container in _CONTAINERS.items() if container.is_mutable])


def _container_of(value: Any) -> _Container | None:
    """What kind of container a value is; subclasses of a class are of its kind, but for those of `partial`."""
    found = _CONTAINERS.get(type(value))
    if found is None and isinstance(value, _WITH_SUBCLASSES):
        found = next((container for cls, container in _CONTAINERS.items() if isinstance(value, cls)), None)
    return found


def _compares_by_field(cls: Any) -> bool:
    """Whether a class is a dataclass whose `==` was generated: it compares `1` and `True`, which differ here."""
    if not hasattr(cls, "__dataclass_params__") or not cls.__dataclass_params__.eq:
        return False
    code = getattr(cls.__eq__, "__code__", None)
    return code is not None and code.co_filename == "<string>"


def _has_own_hash(cls: Any) -> bool:
    """Whether a class has a hash that was not generated: who says so says that its instances stay what they are."""
    code = getattr(cls.__dict__.get("__hash__"), "__code__", None)
    return code is not None and code.co_filename != "<string>"


def _attributes_of(value: Any) -> dict[str, Any]:
    """What an instance holds, without asking the class."""
    return object.__getattribute__(value, "__dict__")


def _can_be_mutated(cls: Any) -> bool:
    """Whether a class is known for instances that change, hashable or not."""
    return issubclass(cls, _MUTABLE) or (_compares_by_field(cls) and not cls.__dataclass_params__.frozen)


def copy_of(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of whatever in a value can be mutated; the rest is shared.

    Args:
        value: the value.
        memo: id → copy, as `copy.deepcopy` has it, of what belongs to one value, which keeps it alive.
    """
    if type(value) in _IMMUTABLE:
        return value
    if isinstance(value, jax.Array) and not isinstance(value, jax.Ref):
        return value
    if id(value) not in memo:  # alive: see above
        memo[id(value)] = _new_copy(value, memo)  # alive: see above
    return memo[id(value)]  # alive: see above


def _new_copy(original: Any, memo: dict[int, Any]) -> Any:
    value: Any = original
    cls: Any = type(value)
    container = _CONTAINERS.get(cls)
    if container is not None:
        return container.copied(value, functools.partial(copy_of, memo=memo))
    if is_namedtuple(cls):
        return cls(*[copy_of(part, memo) for part in value])
    if _compares_by_field(cls) and not _can_be_mutated(cls):
        return value if _has_own_hash(cls) else _copy_of_frozen(value, memo)
    if compares_by_parts(cls) or (not _can_be_mutated(cls) and _is_hashable(value)):
        return value
    try:
        # In a trace, copies of the arrays in it would be tracers.
        with jax.ensure_compile_time_eval():
            return copy.deepcopy(value, memo)
    except Exception as error:  # noqa: BLE001 -- whatever a user's __deepcopy__ raises
        raise Incomparable(value, f"copying it raised {type(error).__name__}: {error}") from None


def _copy_of_frozen(value: Any, memo: dict[int, Any]) -> Any:
    """Asking whether a frozen dataclass can be hashed would walk all paths below it."""
    there = [field.name for field in dataclass_fields(type(value)) if hasattr(value, field.name)]
    copies = {name: copy_of(getattr(value, name), memo) for name in there}
    if all(_is_alike(getattr(value, name), copies[name]) for name in there):
        return value
    made = copy.copy(value)
    for name, each in copies.items():
        object.__setattr__(made, name, each)
    return made


def _is_alike(value: Any, its_copy: Any) -> bool:
    """Whether a copy holds the same objects: a tuple of what cannot be mutated is as good as its copy."""
    if value is its_copy:
        return True
    is_tuple = type(value) is tuple and type(its_copy) is tuple
    return is_tuple and all(a is b for a, b in zip(value, its_copy, strict=True))


class Same:
    """Equal only to the same object, which it keeps alive: tracers and references have no other equality."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and self.obj is other.obj

    def __hash__(self) -> int:
        return object.__hash__(self.obj)  # the object is alive as long as this key is


class _ByEquality:
    """Any other object: same type and `==`. The same object is equal to itself only where it cannot have changed."""

    __slots__ = ("is_hashable", "obj")

    def __init__(self, obj: Any, is_hashable: bool) -> None:
        self.obj = obj
        self.is_hashable = is_hashable

    def __eq__(self, other: object) -> bool:
        if type(other) is not _ByEquality or type(self.obj) is not type(other.obj):
            return False
        return self.obj is other.obj or bool(self.obj == other.obj)

    def __hash__(self) -> int:
        return hash(self.obj) if self.is_hashable else hash(type(self.obj))


def _require_equality(value: Any) -> None:
    try:
        outcome = value == value  # noqa: PLR0124 -- the question is whether it can be asked
    except Exception as error:  # noqa: BLE001 -- whatever a user's __eq__ raises
        raise Incomparable(value, f"its `==` raised {type(error).__name__}: {error}") from None
    if not isinstance(outcome, (bool, np.bool_)):
        raise Incomparable(value, f"its `==` returned {type(outcome).__name__}, not bool")


class Keys(Protocol):
    """Makes the key of a value, part by part. See `_static_values`."""

    is_mutable: bool

    def of_all(self, values: Collection[Any], /) -> tuple[Any, ...]: ...  # noqa: D102

    def note_class(self, value: Any, cls: type, /) -> None: ...  # noqa: D102


def content_of(value: Any, keys: Keys) -> Any:
    """What a value is compared by: its class, and whatever else says what it is. Not for those in `BY_VALUE`.

    Raises:
        Incomparable: if the value, or something in it, has no usable `==`.
    """
    cls: Any = type(value)
    if cls is tuple:  # the most frequent by far, for which looking up the row takes too long
        return cls, keys.of_all(value)
    if cls is float:
        return cls, struct.pack("d", value)
    if cls is complex:
        return cls, struct.pack("dd", value.real, value.imag)
    container = _container_of(value)
    if container is not None:
        if container.is_mutable:
            keys.is_mutable = True
        parts = keys.of_all(container.parts(value))
        return cls, parts if container.is_ordered else frozenset(parts)
    if isinstance(value, np.generic):
        return cls, value.dtype, value.tobytes()
    if isinstance(value, (Tracer, jax.Ref)):
        return cls, Same(value)
    if isinstance(value, jax.Array):
        return _key_of_jax_array(value)
    if _compares_by_field(cls):
        compared = [f.name for f in dataclass_fields(cls) if f.compare and hasattr(value, f.name)]  # or was never set
        before = keys.is_mutable
        parts = keys.of_all([getattr(value, name) for name in compared])
        if _can_be_mutated(cls):
            keys.is_mutable = True
        elif _has_own_hash(cls):
            keys.is_mutable = before
        return cls, tuple(compared), parts
    if compares_by_parts(cls):
        return cls, keys.of_all(_items_of(_attributes_of(value)))
    _require_equality(value)
    if _is_hashable(value):
        keys.note_class(value, cls)
        return cls, _ByEquality(value, is_hashable=True)
    keys.is_mutable = True
    return cls, _ByEquality(copy_of(value, {}), is_hashable=False)


def _key_of_jax_array(value: jax.Array) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.Array, str(value.dtype), value.shape, np.asarray(jax.random.key_data(value)).tobytes()
    return jax.Array, value.dtype, value.weak_type, value.shape, np.asarray(value).tobytes()


class Looked:
    """A value that was looked at: whether it stays the same, and what is in it that was not looked at yet."""

    __slots__ = ("is_settled", "parts")

    def __init__(self, value: Any) -> None:
        parts = _parts_of(value)
        self.is_settled = parts is not None
        self.parts = tuple(parts or ())


def cannot_change(value: Any, known: IdentityDict[Looked] | None = None) -> bool:
    """Whether the same object has the same value for ever.

    A `functools.partial` and a frozen dataclass could be changed, but nobody does. What the fields of the latter hold
    is asked, too, unless its class has a hash of its own, which only what stays the same can have.

    Args:
        value: of any kind.
        known: what was found out about others.
    """
    known = IdentityDict() if known is None else known
    stack = [value]
    while stack:
        found = known.get(stack[-1])
        if found is None:
            found = known[stack[-1]] = Looked(stack[-1])
            stack.extend(found.parts)
            continue
        stack.pop()
        # One that holds itself is still open where it is met again, and what it holds decides.
        found.is_settled = found.is_settled and all(known[part].is_settled for part in found.parts)
        found.parts = ()
    return known[value].is_settled


def _parts_of(value: Any) -> Iterable[Any] | None:
    """What a value is made of that itself cannot change; None if it can, or nothing is known of it."""
    cls: type = type(value)
    container = _CONTAINERS.get(cls)
    if container is not None:
        return None if container.is_mutable else container.parts(value)
    if is_namedtuple(cls):
        return value
    if cls in _IMMUTABLE or is_known_by_address(cls) or issubclass(cls, np.generic):
        return ()
    if _compares_by_field(cls) and not _can_be_mutated(cls):
        if _has_own_hash(cls):
            return ()
        return [getattr(value, field.name) for field in dataclass_fields(cls) if hasattr(value, field.name)]
    if compares_by_parts(cls):
        return _attributes_of(value).values()
    return parts_of_frozen(value)


def is_known_by_address(cls: type) -> bool:
    """Whether each instance of a class has one value for ever, and is likely to be the same object when met again."""
    if cls is functools.partial:  # which is compared by what is in it
        return False
    return cls is type or cls.__eq__ is object.__eq__ or issubclass(cls, _FIXED)
