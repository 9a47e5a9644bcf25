"""The kinds of static value: how each is compared and copied, and whether it stays the same for ever.

    kind                                        compared by        in a copy
    number, text, function, device, lock        `==`               the same object
    container, dataclass with generated `==`    its parts          a new one, if it is mutable or a part is new
    class with `==` and a hash                  its `==`           the same object
    class with `==` and no hash                 its `==`           a new one if that is equal, else the same

Copies are made so that nobody can change what was compared. They are made part by part and never by `copy.deepcopy`: a
deep copy of a function, a lock or a device is another object, or an error. One object in a value is one object in its
copy, so the time for a copy grows with the number of objects, not with the number of paths to them.
"""

import collections
import contextlib
import copy
import enum
import functools
import struct
import types
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._by_identity import IdentityDict, IdentitySet, Interned, WeakIdentityDict
from ._class_attributes import dataclass_fields
from ._library_rows import compares_by_parts, parts_of_frozen
from ._plain_containers import is_namedtuple


class _ArrayContent(tuple[Any, ...]):
    """The dtype, shape and bytes of an array: one part, compared by its own `==` and not entered."""

    __slots__ = ()


BY_VALUE = frozenset({bool, int, str, bytes, type(None), type(...), type(NotImplemented), _ArrayContent})
"""The types whose instances are alike exactly if they have the same type and are equal."""

_IMMUTABLE = BY_VALUE | {float, complex, type, range, types.FunctionType, types.BuiltinFunctionType, types.MethodType}

_FIXED_CLASSES = (type, np.dtype, jax.sharding.PartitionSpec, jax.sharding.Sharding, jax.sharding.Mesh)
"""Classes that, with all their subclasses, have instances that never change."""

_NUMBERS_AND_TEXTS = (float, complex, int, str, bytes)


class Incomparable(Exception):  # noqa: N818 -- never leaves the package; the walk adds the path
    """A value, or something in it, has no usable `==`, or cannot be hashed or copied.

    Attributes:
        value: The object at fault.
        reason: The second half of the message.
    """

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(f"`{type(value).__qualname__}`: {reason}")
        self.value = value
        self.reason = reason


# --- comparison -------------------------------------------------------------------------------------------------------


class KeyMaker(Protocol):
    """Makes the key of a value, part by part. The implementation is in `_static_values`."""

    is_mutable: bool
    may_have_objects: bool

    def keys_of(self, parts: Collection[Any], /) -> tuple[Any, ...]: ...  # noqa: D102

    def note_class(self, value: Any, cls: type, /) -> None: ...  # noqa: D102


def content_of(value: Any, keys: KeyMaker) -> Any:
    """Returns the content by which a value is compared: its class, and everything else that tells it from others.

    Args:
        value: Any object of a class outside `BY_VALUE`.
        keys: Makes the keys of the parts. Its flags `is_mutable` and `may_have_objects` are set where they apply.

    Raises:
        Incomparable: If the value, or something in it, has no usable `==`.
    """
    cls: Any = type(value)
    # By far the most frequent class, and looking up its row in `_CONTAINERS` would take too long.
    if cls is tuple:
        return cls, keys.keys_of(value)
    # No `==` of its own: equal only to itself. A partial inherits the `==` of `object`, but has parts.
    if cls.__eq__ is object.__eq__ and cls is not functools.partial:
        if cls.__hash__ is not object.__hash__:
            _is_hashable(value)  # for the error if its `__hash__` raises
        keys.note_class(value, cls)
        return cls, IdentityKey(value)
    if cls in _NUMBERS_AND_TEXTS:
        return cls, _bits_of(value)
    base = _container_base(cls)
    if base is not None:
        return _content_of_container(value, base, keys)
    if isinstance(value, np.generic):
        return cls, value.dtype, value.tobytes()
    keys.may_have_objects = True
    # The `==` of a tracer or a reference makes an array, or raises.
    if isinstance(value, (Tracer, jax.Ref)):
        return cls, IdentityKey(value)
    if isinstance(value, jax.Array):
        return _content_of_jax_array(value)
    if _compares_by_field(cls):
        return _content_of_dataclass(value, keys)
    if compares_by_parts(cls):
        return cls, keys.keys_of(_keys_and_values(_attributes_of(value)))
    # Any other class has an `==` of its own, which decides.
    _require_equality(value)
    # A subclass of `float` inherits an `==` that takes 0.0 for -0.0.
    bits = _bits_of(value) if isinstance(value, _NUMBERS_AND_TEXTS) else None
    if _is_hashable(value):
        keys.note_class(value, cls)
        return cls, bits, _equality_key(value)
    keys.is_mutable = True
    return cls, bits, _equality_key_of_copy(value)


def _content_of_container(value: Any, base: type, keys: KeyMaker) -> Any:
    """Returns the content of a container: its parts and, if a subclass has an `==` of its own, a key for that."""
    cls, container = type(value), _CONTAINERS[base]
    if container.is_mutable or (cls is not base and not _is_only_its_items(cls)) or cls is functools.partial:
        keys.may_have_objects = True
    if container.is_mutable:
        keys.is_mutable = True
    parts = keys.keys_of(container.parts(value))
    content = parts if container.is_ordered else frozenset(parts)
    # The `==` of an array gives one answer per element, so it cannot be asked.
    if cls is base or cls.__eq__ is base.__eq__ or base is np.ndarray:
        return cls, content
    _require_equality(value)
    return cls, content, _equality_key_of_copy(value)


def _content_of_dataclass(value: Any, keys: KeyMaker) -> Any:
    """Returns the content of a dataclass with a generated `==`: the fields compared by it."""
    cls: Any = type(value)
    # A field that was never set is left out.
    compared = [field.name for field in dataclass_fields(cls) if field.compare and hasattr(value, field.name)]
    was_mutable = keys.is_mutable
    parts = keys.keys_of([getattr(value, name) for name in compared])
    if _can_be_mutated(cls):
        keys.is_mutable = True
    elif _defines_hash(cls):
        # The class vouches for its parts, so a list in it does not count as mutable.
        keys.is_mutable = was_mutable
    return cls, tuple(compared), parts


def _content_of_jax_array(value: jax.Array) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.Array, str(value.dtype), value.shape, np.asarray(jax.random.key_data(value)).tobytes()
    return jax.Array, value.dtype, value.weak_type, value.shape, np.asarray(value).tobytes()


def _bits_of(value: Any) -> Any:
    """Returns the plain number or text of an instance of `_NUMBERS_AND_TEXTS` or a subclass.

    Floats are returned as bytes, so that 0.0 and -0.0 differ and `nan` equals itself.
    """
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, complex):
        return struct.pack("dd", value.real, value.imag)
    base: Any = next(base for base in (int, str, bytes) if isinstance(value, base))
    instance: Any = value
    # The method of the base is called, since a subclass may override the operator.
    return base.__pos__(instance) if base is int else base.__getitem__(instance, slice(None))


class IdentityKey:
    """A key equal only to keys of the same object, kept alive by it."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return type(other) is IdentityKey and self.obj is other.obj

    def __hash__(self) -> int:
        return object.__hash__(self.obj)  # the object is alive as long as this key is


class _EqualityKey:
    """A key equal to keys of the same object, and of equal objects of the same type.

    The hash is taken once. So an object that changes although it can be hashed stays what it was when it was first
    compared, as in `jax.jit`.
    """

    __slots__ = ("__weakref__", "_hash", "obj")

    def __init__(self, obj: Any, hash_value: int) -> None:
        self.obj = obj
        self._hash = hash_value

    def __eq__(self, other: object) -> bool:
        if type(other) is not _EqualityKey or type(self.obj) is not type(other.obj):
            return False
        return self.obj is other.obj or bool(self.obj == other.obj)

    def __hash__(self) -> int:
        return self._hash

    def complete(self) -> None:
        """Does nothing: a key is complete when it is made. `Interned` asks for this method."""

    def is_like(self, key: "_EqualityKey") -> bool:
        """Returns True if both keys are equal."""
        return self == key


_equality_keys: Interned[_EqualityKey] = Interned()

_first_keys: WeakIdentityDict["weakref.ref[_EqualityKey]"] = WeakIdentityDict()
"""Object with an `==` and a hash of its own → the first key that was made for it, for as long as a structure has it.

Equal keys are one object, so a key lives on if an earlier structure has an equal object.
"""


def _equality_key(value: Any) -> _EqualityKey:
    """Returns the key of a hashable object: its first one, if still alive."""
    reference = _first_keys.get(value)
    first_key = None if reference is None else reference()
    if first_key is not None:
        return first_key
    hash_value = hash(value)
    key = _equality_keys.intern(hash_value, _EqualityKey(value, hash_value))
    with contextlib.suppress(TypeError):  # it cannot be referred to weakly
        _first_keys[value] = weakref.ref(key)
    return key


def _equality_key_of_copy(value: Any) -> _EqualityKey:
    """Makes the key of an object without a stable hash, from a copy of it and the hash of its class."""
    return _EqualityKey(copy_of(value, IdentityDict()), hash(type(value)))


def _require_equality(value: Any) -> None:
    """Raises `Incomparable` unless `value == value` returns a bool."""
    try:
        outcome = value == value  # noqa: PLR0124 -- the question is whether it can be asked
    except Exception as error:  # noqa: BLE001 -- whatever a user's __eq__ raises
        raise Incomparable(value, f"its `==` raised {type(error).__name__}: {error}") from None
    if not isinstance(outcome, (bool, np.bool_)):
        raise Incomparable(value, f"its `==` returned {type(outcome).__name__}, not bool")


def _is_equal(value: Any, counterpart: Any) -> bool:
    """Compares by `==`, and turns any exception into `Incomparable`."""
    try:
        return bool(value == counterpart)
    except Exception as error:  # noqa: BLE001 -- whatever a user's `__eq__` raises
        raise Incomparable(value, f"its `==` raised {type(error).__name__}: {error}") from None


def _is_hashable(value: Any) -> bool:
    """Returns False if hashing raises `TypeError`, and turns any other exception into `Incomparable`."""
    try:
        hash(value)
    except TypeError:
        return False
    except Exception as error:  # noqa: BLE001 -- whatever a user's __hash__ raises
        raise Incomparable(value, f"taking its hash raised {type(error).__name__}: {error}") from None
    return True


# --- copies -----------------------------------------------------------------------------------------------------------


def copy_of(value: Any, copies: IdentityDict[Any]) -> Any:
    """Copies everything mutable in a value, and shares the rest. See the table at the top of this file.

    Args:
        value: Any static value.
        copies: The copies made so far. This call uses and extends them, so one object has one copy.

    Returns:
        The copy; the value itself if nothing in it can be mutated.

    Raises:
        Incomparable: If an object refuses to be copied.
    """
    cls: Any = type(value)
    if cls in _IMMUTABLE or (isinstance(value, jax.Array) and not isinstance(value, jax.Ref)):
        return value
    if value in copies:
        return copies[value]
    base = _container_base(cls)
    if base is not None:
        copied = _CONTAINERS[base].copy(value, functools.partial(copy_of, copies=copies))
        if cls is not base and copied is not value:
            _copy_attributes(value, copied, copies)
    elif _compares_by_field(cls):
        copied = value if _defines_hash(cls) else _copy_dataclass(value, copies)
    elif compares_by_parts(cls) or _is_hashable(value):
        copied = value
    else:
        copied = _copy_unhashable(value, copies)
    copies[value] = copied
    return copied


def _copy_dataclass(value: Any, copies: IdentityDict[Any]) -> Any:
    """Copies a dataclass with a generated `==`, unless it is frozen and holds nothing mutable."""
    if _can_be_mutated(type(value)):
        return _copy_by_parts(value, copies)
    # A frozen one is not asked for its hash, for that would walk all paths below it.
    names = [field.name for field in dataclass_fields(type(value)) if hasattr(value, field.name)]
    new_parts = {name: copy_of(getattr(value, name), copies) for name in names}
    if all(getattr(value, name) is new_parts[name] for name in names):
        return value
    clone = copy.copy(value)
    for name, part in new_parts.items():
        object.__setattr__(clone, name, part)
    return clone


def _copy_unhashable(value: Any, copies: IdentityDict[Any]) -> Any:
    """Copies an object with an `==` of its own and no hash. Returns the object itself if the copy is not equal."""
    size_before = len(copies)
    if hasattr(value, "__dict__") or _slots_of(type(value)):
        clone = _copy_by_parts(value, copies)
    else:
        clone = _run_copier(copy.deepcopy, value)
    if clone is value or _is_equal(value, clone):
        return clone
    # Copies of its parts may lead to the clone, which is given up.
    copies.forget_after(size_before)
    return value


def _copy_by_parts(value: Any, copies: IdentityDict[Any]) -> Any:
    """Copies an object by `copy.copy`, and then its attributes part by part."""
    clone = _run_copier(copy.copy, value)
    if clone is value or type(clone) is not type(value):
        return value
    # Entered before its parts are copied, for they may lead back to the object.
    copies[value] = clone
    _copy_attributes(value, clone, copies)
    return clone


def _run_copier(copier: Callable[[Any], Any], value: Any) -> Any:
    """Calls `copy.copy` or `copy.deepcopy`, and turns any exception into `Incomparable`."""
    try:
        # In a trace, copies of the arrays in it would be tracers.
        with jax.ensure_compile_time_eval():
            return copier(value)
    except Exception as error:  # noqa: BLE001 -- whatever a user's `__copy__` raises
        raise Incomparable(value, f"copying it raised {type(error).__name__}: {error}") from None


def _copy_attributes(value: Any, clone: Any, copies: IdentityDict[Any]) -> None:
    """Replaces the contents of a shallow copy's `__dict__` and slots by copies."""
    # A list, for another thread may add an attribute meanwhile.
    for name, part in list(getattr(value, "__dict__", {}).items()):
        # A part that `__copy__` has replaced is the clone's alone already.
        if vars(clone).get(name, part) is part:
            vars(clone)[name] = copy_of(part, copies)
    for slot in _slots_of(type(value)):
        try:
            part = slot.__get__(value)
        except AttributeError:  # never set
            continue
        with contextlib.suppress(AttributeError, TypeError):  # it is read-only, as those of classes in C are
            slot.__set__(clone, copy_of(part, copies))


def _slots_of(cls: type) -> list[Any]:
    """Returns the descriptors of the slots of a class and its bases."""
    descriptors = [entry for base in cls.__mro__ for entry in vars(base).values()]
    return [entry for entry in descriptors if type(entry) is types.MemberDescriptorType]


def with_new_parts(value: Any, new_part: "_CopyPart") -> Any:
    """Makes a container anew if one of its parts is new; otherwise returns it, or whatever is no container.

    Args:
        value: Any static value.
        new_part: part → itself or the object in its place. It is called more than once for a part.
    """
    cls = type(value)
    container = _CONTAINERS.get(tuple if _is_only_its_items(cls) else cls)
    if container is None or all(new_part(part) is part for part in container.parts(value)):
        return value
    return container.copy(value, new_part)


# --- stability --------------------------------------------------------------------------------------------------------


class Stability:
    """Answer for one value: does it stay the same for ever, as far as its parts have been visited?

    Attributes:
        is_settled: False once the value, or a visited part, can change.
        parts: The parts to ask. Empty once they have answered.
    """

    __slots__ = ("is_settled", "parts")

    def __init__(self, value: Any) -> None:
        parts = _parts_if_fixed(value)
        self.is_settled = parts is not None
        self.parts = tuple(parts or ())


def cannot_change(value: Any, stabilities: IdentityDict[Stability] | None = None) -> bool:
    """Returns True if the object keeps its value for ever.

    A `functools.partial` and a frozen dataclass could be changed, but nobody does, so only their parts decide. The
    fields of a dataclass with a hash of its own are not asked: by its hash it promises to stay the same.

    Args:
        value: Any static value.
        stabilities: The answers so far. This call uses and extends them.
    """
    stabilities = IdentityDict() if stabilities is None else stabilities
    stack = [value]
    while stack:
        stability = stabilities.get(stack[-1])
        # On the way down, the parts are put on top of the value.
        if stability is None:
            stability = stabilities[stack[-1]] = Stability(stack[-1])
            stack.extend(stability.parts)
            continue
        # On the way up, all parts have an answer. A value that contains itself meets its own preliminary one, which
        # is True, so its other parts decide.
        stack.pop()
        stability.is_settled = stability.is_settled and all(stabilities[part].is_settled for part in stability.parts)
        stability.parts = ()
    return stabilities[value].is_settled


def _parts_if_fixed(value: Any) -> Iterable[Any] | None:
    """Returns the parts of a value if it cannot change except through them; else, or for an unknown class, None."""
    cls: type = type(value)
    container = _CONTAINERS.get(tuple if is_namedtuple(cls) else cls)
    if container is not None:
        return None if container.is_mutable else container.parts(value)
    if cls in _IMMUTABLE or is_known_by_address(cls) or issubclass(cls, np.generic):
        return ()
    if _compares_by_field(cls) and not _can_be_mutated(cls):
        if _defines_hash(cls):
            return ()
        return [getattr(value, field.name) for field in dataclass_fields(cls) if hasattr(value, field.name)]
    if compares_by_parts(cls):
        return _attributes_of(value).values()
    return parts_of_frozen(value)


def is_known_by_address(cls: type) -> bool:
    """Returns True if an instance keeps its value for ever and the same object is likely to come again."""
    # A partial has the `==` of `object`, but is compared by its parts.
    if cls is functools.partial:
        return False
    return cls is type or cls.__eq__ is object.__eq__ or issubclass(cls, _FIXED_CLASSES)


# --- objects with identity --------------------------------------------------------------------------------------------

_INTERCHANGEABLE = BY_VALUE | {float, complex, range, types.MethodType, types.BuiltinFunctionType}

_MANY_PARTS = 200
"""The number of visits from which on entered parts are remembered. Before, entering one again is cheaper."""


def objects_with_identity(value: Any) -> list[Any]:
    """Lists the objects in a static value, itself included, for which an equal object is no substitute.

    A user can tell by `is` whether a list or a config in a model is still the same one. Also, an `==` may compare only
    some attributes of an object. Numbers, texts and tuples have nothing beside their value, and two functions or
    devices are equal only if they are one. The parts of a listed object are not entered.

    Returns:
        The objects in the order of the walk, without repetitions.
    """
    objects = IdentitySet()
    entered: IdentitySet | None = None
    num_visits = 0
    stack = [value]
    while stack:
        part = stack.pop()
        cls: Any = type(part)
        if cls in _INTERCHANGEABLE:
            continue
        num_visits += 1
        if num_visits == _MANY_PARTS:
            entered = IdentitySet()
        if entered is not None and not entered.add(part):
            continue
        if cls is tuple:
            stack.extend(reversed(part))
            continue
        # A partial has the `==` of `object`, but is compared by its parts.
        has_no_content = cls.__eq__ is object.__eq__ and cls is not functools.partial
        if has_no_content or issubclass(cls, (np.generic, enum.Enum, *_FIXED_CLASSES)):
            continue
        if cls in (slice, frozenset) or _is_only_its_items(cls):
            parts: Iterable[Any] | None = _CONTAINERS[cls if cls in _CONTAINERS else tuple].parts(part)
        else:
            parts = parts_of_frozen(part)
        if parts is None:
            objects.add(part)
        else:
            stack.extend(reversed(list(parts)))
    return list(objects)


# --- properties of classes --------------------------------------------------------------------------------------------


def _compares_by_field(cls: Any) -> bool:
    """Returns True for a dataclass with a generated `==`. This takes `1` for `True`, so it is not called."""
    if not hasattr(cls, "__dataclass_params__") or not cls.__dataclass_params__.eq:
        return False
    # `dataclass(eq=True)` keeps an `__eq__` that the class defines. A generated one was compiled from a string.
    code = getattr(cls.__eq__, "__code__", None)
    return code is not None and code.co_filename == "<string>"


def _defines_hash(cls: Any) -> bool:
    """Returns True for a class with a hash written by hand: a promise of instances that do not change."""
    code = getattr(cls.__dict__.get("__hash__"), "__code__", None)
    return code is not None and code.co_filename != "<string>"


def _can_be_mutated(cls: Any) -> bool:
    """Returns True for a mutable container and for a dataclass with a generated `==`, unless frozen."""
    return issubclass(cls, _MUTABLE) or (_compares_by_field(cls) and not cls.__dataclass_params__.frozen)


def _is_only_its_items(cls: Any) -> bool:
    """Returns True for a namedtuple without attributes or an `==` of its own."""
    return is_namedtuple(cls) and cls.__eq__ is tuple.__eq__ and cls.__dictoffset__ == 0


def _container_base(cls: type) -> type | None:
    """Returns the class itself or its first base in `_CONTAINERS`. Subclasses of `partial` are no containers."""
    if cls in _CONTAINERS:
        return cls
    if not issubclass(cls, _WITH_SUBCLASSES):
        return None
    return next(base for base in _WITH_SUBCLASSES if issubclass(cls, base))


def _attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an instance, without calling its class."""
    return object.__getattribute__(value, "__dict__")


# --- containers: their parts and copies -------------------------------------------------------------------------------
# The functions call the methods of the built-in class and never `value.append` or the like, which a subclass may have
# overridden.

_CopyPart = Callable[[Any], Any]


class _Container(NamedTuple):
    """One kind of container.

    Attributes:
        is_mutable: True if an instance can be changed.
        parts: instance → the values by which it is compared, beside its class.
        copy: (instance, copies a part) → a copy of the same class; the instance itself if it is immutable and each
            part is its own copy.
        is_ordered: True if the order of the parts counts.
    """

    is_mutable: bool
    parts: Callable[[Any], Collection[Any]]
    copy: Callable[[Any, _CopyPart], Any]
    is_ordered: bool = True


def _keys_and_values(mapping: dict[Any, Any]) -> list[Any]:
    """Returns the keys and then the values, in order, since whoever gets the dictionary can see the order."""
    return [*dict.keys(mapping), *dict.values(mapping)]


def _parts_of_ordered_dict(mapping: "collections.OrderedDict[Any, Any]") -> list[Any]:
    """Returns the keys and then the values of an `OrderedDict`. After `move_to_end`, `dict.keys` has a stale order."""
    keys = list(collections.OrderedDict.__iter__(mapping))
    return [*keys, *[dict.__getitem__(mapping, key) for key in keys]]


def _parts_of_array(value: np.ndarray[Any, Any]) -> list[Any]:
    """Returns the dtype, shape and bytes of an array as one part; for objects, the elements in place of the bytes."""
    # `tobytes` of a masked array would leave out the masked elements.
    array = value.view(np.ndarray)
    if array.dtype.hasobject:
        content: list[Any] = [_ArrayContent((array.dtype, array.shape)), *array.ravel().tolist()]
    else:
        content = [_ArrayContent((array.dtype, array.shape, array.tobytes()))]
    # A subclass has its mask or its unit in attributes.
    return content if type(value) is np.ndarray else [*content, *_keys_and_values(getattr(value, "__dict__", {}))]


def _keep(value: Any, _: _CopyPart) -> Any:
    return value


def _copy_tuple(value: Any, copy_part: _CopyPart) -> Any:
    parts = [copy_part(part) for part in tuple.__iter__(value)]
    is_unchanged = all(part is copied for part, copied in zip(tuple.__iter__(value), parts, strict=True))
    return value if is_unchanged else tuple.__new__(type(value), parts)


def _copy_slice(value: slice, copy_part: _CopyPart) -> slice:
    bounds = value.start, value.stop, value.step
    copied = _copy_tuple(bounds, copy_part)
    return value if copied is bounds else slice(*copied)


def _copy_partial(value: functools.partial[Any], copy_part: _CopyPart) -> functools.partial[Any]:
    func, args = copy_part(value.func), _copy_tuple(value.args, copy_part)
    keywords = {name: copy_part(part) for name, part in value.keywords.items()}
    has_new_keyword = any(part is not keywords[name] for name, part in value.keywords.items())
    if func is value.func and args is value.args and not has_new_keyword:
        return value
    return functools.partial(func, *args, **keywords)


def _copy_list(value: Any, copy_part: _CopyPart) -> Any:
    clone = list.__new__(type(value))
    list.extend(clone, [copy_part(part) for part in list.__iter__(value)])
    return clone


def _copy_dict(value: Any, copy_part: _CopyPart) -> Any:
    clone = dict.__new__(type(value))
    dict.update(clone, {key: copy_part(part) for key, part in dict.items(value)})
    return clone


def _copy_ordered_dict(value: Any, copy_part: _CopyPart) -> Any:
    clone = collections.OrderedDict.__new__(type(value))
    for key in collections.OrderedDict.__iter__(value):
        collections.OrderedDict.__setitem__(clone, key, copy_part(dict.__getitem__(value, key)))
    return clone


def _copy_default_dict(value: Any, copy_part: _CopyPart) -> Any:
    clone = collections.defaultdict.__new__(type(value))
    collections.defaultdict.__init__(clone, value.default_factory)
    dict.update(clone, {key: copy_part(part) for key, part in dict.items(value)})
    return clone


def _copy_set(value: Any, _: _CopyPart) -> Any:
    clone = set.__new__(type(value))
    set.update(clone, set.__iter__(value))
    return clone


def _copy_bytearray(value: Any, _: _CopyPart) -> Any:
    clone = bytearray.__new__(type(value))
    bytearray.extend(clone, bytes(value))
    return clone


def _copy_deque(value: Any, copy_part: _CopyPart) -> Any:
    clone = collections.deque.__new__(type(value))
    parts = [copy_part(part) for part in collections.deque.__iter__(value)]
    collections.deque.__init__(clone, parts, value.maxlen)
    return clone


def _copy_array(value: Any, copy_part: _CopyPart) -> Any:
    clone = np.ndarray.copy(value)
    if clone.dtype.hasobject:
        elements = clone.view(np.ndarray)
        for index in np.ndindex(elements.shape):
            elements[index] = copy_part(elements[index])
    return clone


def _copy_mapping_proxy(value: Any, copy_part: _CopyPart) -> Any:
    return types.MappingProxyType({key: copy_part(part) for key, part in value.items()})


def _copy_namespace(value: Any, copy_part: _CopyPart) -> Any:
    clone = types.SimpleNamespace.__new__(type(value))
    vars(clone).update({name: copy_part(part) for name, part in vars(value).items()})
    return clone


_CONTAINERS: dict[type, _Container] = {
    tuple: _Container(False, lambda value: list(tuple.__iter__(value)), _copy_tuple),
    # The elements of a set can be hashed, so they are not copied.
    frozenset: _Container(False, lambda value: list(frozenset.__iter__(value)), _keep, is_ordered=False),
    slice: _Container(False, lambda value: (value.start, value.stop, value.step), _copy_slice),
    # `range(0, 3, 2) == range(0, 4, 2)`, and whoever gets one can see which it is.
    range: _Container(False, lambda value: (value.start, value.stop, value.step), _keep),
    functools.partial: _Container(
        False, lambda value: [value.func, value.args, *_keys_and_values(value.keywords)], _copy_partial
    ),
    list: _Container(True, lambda value: list(list.__iter__(value)), _copy_list),
    collections.OrderedDict: _Container(True, _parts_of_ordered_dict, _copy_ordered_dict),
    collections.defaultdict: _Container(
        True, lambda value: [value.default_factory, *_keys_and_values(value)], _copy_default_dict
    ),
    dict: _Container(True, _keys_and_values, _copy_dict),
    set: _Container(True, lambda value: list(set.__iter__(value)), _copy_set, is_ordered=False),
    bytearray: _Container(True, lambda value: [bytes(value)], _copy_bytearray),
    collections.deque: _Container(True, lambda value: [value.maxlen, *collections.deque.__iter__(value)], _copy_deque),
    np.ndarray: _Container(True, _parts_of_array, _copy_array),
    # Whoever has the dictionary behind a proxy can change it.
    types.MappingProxyType: _Container(True, lambda value: [*value.keys(), *value.values()], _copy_mapping_proxy),
    types.SimpleNamespace: _Container(True, lambda value: _keys_and_values(vars(value)), _copy_namespace),
}
"""Class of containers → its row. Subclasses come before their bases."""

_WITH_SUBCLASSES = tuple([cls for cls in _CONTAINERS if cls is not functools.partial])
_MUTABLE = tuple([cls for cls, container in _CONTAINERS.items() if container.is_mutable])
