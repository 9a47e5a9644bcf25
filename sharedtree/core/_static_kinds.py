"""The kinds of static value: what each is compared by, how it is copied, and whether it stays the same for ever.

    kind                                        compared by        in a copy
    number, text, function, device, lock        `==`               the same object
    container, dataclass with generated `==`    its parts          a new one, if it is mutable or a part is new
    class with `==` and a hash                  its `==`           the same object
    class with `==` and no hash                 its `==`           a new one if that is equal, else the same

A copy is taken so that nobody can change what was compared. It is taken part by part and never by `copy.deepcopy`, for
a deep copy of a function, a lock or a device is another object, or an error. One object in a value is one object in its
copy, so a copy takes as long as there are objects, however many paths lead to them.
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

from ._by_identity import IdentityDict, IdentitySet, WeakIdentityDict
from ._class_attributes import dataclass_fields
from ._interned_objects import Interned
from ._library_rows import compares_by_parts, parts_of_frozen
from ._plain_containers import is_namedtuple


class _Facts(tuple[Any, ...]):
    """What is compared by its own `==`, and not part by part: the dtype, the shape and the bytes of an array."""

    __slots__ = ()


BY_VALUE = frozenset({bool, int, str, bytes, type(None), type(...), type(NotImplemented), _Facts})
"""The types whose instances are alike exactly if they have the same type and are equal."""

_IMMUTABLE = BY_VALUE | {float, complex, type, range, types.FunctionType, types.BuiltinFunctionType, types.MethodType}
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
        is_mutable: Whether an instance can be changed.
        parts: instance → the values that it is compared by, beside its class.
        copied: (instance, how a part is copied) → a copy of the same class. It calls nothing that a subclass defines.
        is_ordered: Whether the order of the parts counts.
    """

    is_mutable: bool
    parts: Callable[[Any], Collection[Any]]
    copied: Callable[[Any, Callable[[Any], Any]], Any]
    is_ordered: bool = True


_CopyPart = Callable[[Any], Any]


def _itself(value: Any, _: Any = None) -> Any:
    return value


def _items_of(value: dict[Any, Any]) -> list[Any]:
    """The keys and the values, in order, since whoever gets the dictionary can see that too."""
    return [*dict.keys(value), *dict.values(value)]


def _items_in_own_order(value: "collections.OrderedDict[Any, Any]") -> list[Any]:
    """The keys and the values of an `OrderedDict`, whose order `dict.keys` does not know after `move_to_end`."""
    keys = list(collections.OrderedDict.__iter__(value))
    return [*keys, *[dict.__getitem__(value, key) for key in keys]]


def _parts_of_array(value: np.ndarray[Any, Any]) -> list[Any]:
    array = value.view(np.ndarray)  # `tobytes` of a masked array would leave out what is masked
    if array.dtype.hasobject:
        content: list[Any] = [_Facts((array.dtype, array.shape)), *array.ravel().tolist()]
    else:
        content = [_Facts((array.dtype, array.shape, array.tobytes()))]
    # A subclass has its mask or its unit in attributes.
    return content if type(value) is np.ndarray else [*content, *_items_of(getattr(value, "__dict__", {}))]


def _copied_tuple(value: Any, copy_part: _CopyPart) -> Any:
    parts = [copy_part(part) for part in tuple.__iter__(value)]
    is_same = all(part is copied for part, copied in zip(tuple.__iter__(value), parts, strict=True))
    return value if is_same else tuple.__new__(type(value), parts)


def _copied_slice(value: slice, copy_part: _CopyPart) -> slice:
    parts = value.start, value.stop, value.step
    copies = _copied_tuple(parts, copy_part)
    return value if copies is parts else slice(*copies)


def _copied_partial(value: functools.partial[Any], copy_part: _CopyPart) -> functools.partial[Any]:
    func, args = copy_part(value.func), _copied_tuple(value.args, copy_part)
    keywords = {name: copy_part(part) for name, part in value.keywords.items()}
    is_same = func is value.func and args is value.args
    if is_same and all(part is keywords[name] for name, part in value.keywords.items()):
        return value
    return functools.partial(func, *args, **keywords)


def _copied_list(value: Any, copy_part: _CopyPart) -> Any:
    made = list.__new__(type(value))
    list.extend(made, [copy_part(part) for part in list.__iter__(value)])
    return made


def _copied_dict(value: Any, copy_part: _CopyPart) -> Any:
    made = dict.__new__(type(value))
    dict.update(made, {key: copy_part(part) for key, part in dict.items(value)})
    return made


def _copied_ordered_dict(value: Any, copy_part: _CopyPart) -> Any:
    made = collections.OrderedDict.__new__(type(value))
    for key in collections.OrderedDict.__iter__(value):
        collections.OrderedDict.__setitem__(made, key, copy_part(dict.__getitem__(value, key)))
    return made


def _copied_default_dict(value: Any, copy_part: _CopyPart) -> Any:
    made = collections.defaultdict.__new__(type(value))
    collections.defaultdict.__init__(made, value.default_factory)
    dict.update(made, {key: copy_part(part) for key, part in dict.items(value)})
    return made


def _copied_set(value: Any, _: _CopyPart) -> Any:
    made = set.__new__(type(value))
    set.update(made, set.__iter__(value))
    return made


def _copied_bytearray(value: Any, _: _CopyPart) -> Any:
    made = bytearray.__new__(type(value))
    bytearray.extend(made, bytes(value))
    return made


def _copied_deque(value: Any, copy_part: _CopyPart) -> Any:
    made = collections.deque.__new__(type(value))
    collections.deque.__init__(made, [copy_part(part) for part in collections.deque.__iter__(value)], value.maxlen)
    return made


def _copied_array(value: Any, copy_part: _CopyPart) -> Any:
    made = np.ndarray.copy(value)
    if made.dtype.hasobject:
        plain = made.view(np.ndarray)
        for place in np.ndindex(plain.shape):
            plain[place] = copy_part(plain[place])
    return made


def _copied_namespace(value: Any, copy_part: _CopyPart) -> Any:
    made = types.SimpleNamespace.__new__(type(value))
    vars(made).update({name: copy_part(part) for name, part in vars(value).items()})
    return made


def _copied_mapping_proxy(value: Any, copy_part: _CopyPart) -> Any:
    return types.MappingProxyType({key: copy_part(part) for key, part in value.items()})


_CONTAINERS: dict[type, _Container] = {
    tuple: _Container(False, lambda value: list(tuple.__iter__(value)), _copied_tuple),
    frozenset: _Container(False, lambda value: list(frozenset.__iter__(value)), _itself, is_ordered=False),
    slice: _Container(False, lambda value: (value.start, value.stop, value.step), _copied_slice),
    # `range(0, 3, 2) == range(0, 4, 2)`, and whoever gets one can see which it is.
    range: _Container(False, lambda value: (value.start, value.stop, value.step), _itself),
    functools.partial: _Container(
        False, lambda value: [value.func, value.args, *_items_of(value.keywords)], _copied_partial
    ),
    list: _Container(True, lambda value: list(list.__iter__(value)), _copied_list),
    collections.OrderedDict: _Container(True, _items_in_own_order, _copied_ordered_dict),
    collections.defaultdict: _Container(
        True, lambda value: [value.default_factory, *_items_of(value)], _copied_default_dict
    ),
    dict: _Container(True, _items_of, _copied_dict),
    set: _Container(True, lambda value: list(set.__iter__(value)), _copied_set, is_ordered=False),
    bytearray: _Container(True, lambda value: [bytes(value)], _copied_bytearray),
    collections.deque: _Container(
        True, lambda value: [value.maxlen, *collections.deque.__iter__(value)], _copied_deque
    ),
    np.ndarray: _Container(True, _parts_of_array, _copied_array),
    # Whoever has the dictionary behind it can change it.
    types.MappingProxyType: _Container(True, lambda value: [*value.keys(), *value.values()], _copied_mapping_proxy),
    types.SimpleNamespace: _Container(True, lambda value: _items_of(vars(value)), _copied_namespace),
}
"""Subclasses stand before their bases."""

_WITH_SUBCLASSES = tuple([cls for cls in _CONTAINERS if cls is not functools.partial])
_MUTABLE = tuple([cls for cls, container in _CONTAINERS.items() if container.is_mutable])


def with_new_parts(value: Any, new_part: _CopyPart) -> Any:
    """Makes a container anew if one of its parts is new. Returns it, and whatever is no container, otherwise."""
    cls = type(value)
    container = _CONTAINERS.get(tuple if _is_only_its_items(cls) else cls)
    if container is None or all(new_part(part) is part for part in container.parts(value)):
        return value
    return container.copied(value, new_part)


def _container_base(cls: type) -> type | None:
    """The class in `_CONTAINERS` that a class is or derives from; subclasses of `partial` are no containers."""
    if cls in _CONTAINERS:
        return cls
    if not issubclass(cls, _WITH_SUBCLASSES):
        return None
    return next(base for base in _WITH_SUBCLASSES if issubclass(cls, base))


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


def copy_of(value: Any, memo: IdentityDict[Any]) -> Any:
    """Copies whatever in a value can be mutated; the rest is shared. See the table at the top of this file.

    Args:
        value: Any static value.
        memo: The copies made so far. One object has one copy for as long as a memo is used.

    Raises:
        Incomparable: If an object that has to be copied refuses.
    """
    cls: Any = type(value)
    if cls in _IMMUTABLE or (isinstance(value, jax.Array) and not isinstance(value, jax.Ref)):
        return value
    if value in memo:
        return memo[value]
    base = _container_base(cls)
    if base is not None:
        copied = _CONTAINERS[base].copied(value, functools.partial(copy_of, memo=memo))
        if cls is not base and copied is not value:
            _copy_attributes(value, copied, memo)
    elif _compares_by_field(cls):
        copied = value if _has_own_hash(cls) else _copy_of_dataclass(value, memo)
    elif compares_by_parts(cls) or _is_hashable(value):
        copied = value
    else:
        copied = _copy_of_unhashable(value, memo)
    memo[value] = copied
    return copied


def _copy_of_dataclass(value: Any, memo: IdentityDict[Any]) -> Any:
    """Copies a dataclass with a generated `==`, unless it is frozen and holds nothing that can be mutated.

    Asking whether a frozen one can be hashed would walk all paths below it.
    """
    if _can_be_mutated(type(value)):
        return _copied_by_parts(value, memo)
    names = [field.name for field in dataclass_fields(type(value)) if hasattr(value, field.name)]
    copies = {name: copy_of(getattr(value, name), memo) for name in names}
    if all(getattr(value, name) is copies[name] for name in names):
        return value
    made = copy.copy(value)
    for name, copied in copies.items():
        object.__setattr__(made, name, copied)
    return made


def _copy_of_unhashable(value: Any, memo: IdentityDict[Any]) -> Any:
    """Copies an object with an `==` of its own and no hash. One that does not equal its copy is kept itself."""
    size = len(memo)
    if hasattr(value, "__dict__") or _slots_of(type(value)):
        copied = _copied_by_parts(value, memo)
    else:
        copied = _made_by(copy.deepcopy, value)
    if copied is value or _is_equal(value, copied):
        return copied
    # What was copied on the way may lead to the copy that is given up.
    memo.forget_after(size)
    return value


def _copied_by_parts(value: Any, memo: IdentityDict[Any]) -> Any:
    """Copies an object by `copy.copy`, and then what is in its `__dict__` and slots part by part."""
    made = _made_by(copy.copy, value)
    if made is value or type(made) is not type(value):
        return value
    memo[value] = made  # first, for what it holds may lead back to it
    _copy_attributes(value, made, memo)
    return made


def _made_by(copier: Callable[[Any], Any], value: Any) -> Any:
    try:
        # In a trace, copies of the arrays in it would be tracers.
        with jax.ensure_compile_time_eval():
            return copier(value)
    except Exception as error:  # noqa: BLE001 -- whatever a user's `__copy__` raises
        raise Incomparable(value, f"copying it raised {type(error).__name__}: {error}") from None


def _copy_attributes(value: Any, made: Any, memo: IdentityDict[Any]) -> None:
    """Gives a copy its own copies of what the original has in its `__dict__` and its slots."""
    # Another thread may add an attribute meanwhile.
    for name, part in list(getattr(value, "__dict__", {}).items()):
        if vars(made).get(name, part) is part:
            vars(made)[name] = copy_of(part, memo)
    for slot in _slots_of(type(value)):
        try:
            part = slot.__get__(value)
        except AttributeError:  # never set
            continue
        with contextlib.suppress(AttributeError, TypeError):  # it is read-only, as those of classes in C are
            slot.__set__(made, copy_of(part, memo))


def _slots_of(cls: type) -> list[Any]:
    """The descriptors of a class's slots, those of its bases included."""
    descriptors = [entry for base in cls.__mro__ for entry in vars(base).values()]
    return [entry for entry in descriptors if type(entry) is types.MemberDescriptorType]


def _is_equal(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except Exception as error:  # noqa: BLE001 -- whatever a user's `__eq__` raises
        raise Incomparable(value, f"its `==` raised {type(error).__name__}: {error}") from None


class IdentityKey:
    """Equal only to the same object, which it keeps alive: tracers and references have no other equality."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return type(other) is IdentityKey and self.obj is other.obj

    def __hash__(self) -> int:
        return object.__hash__(self.obj)  # the object is alive as long as this key is


class _ByEquality:
    """Equal to an object of the same type with which `==` says so, and to the same object.

    The hash is taken once. So an object that changes although it can be hashed stays what it was when it was first
    compared, as in `jax.jit`.
    """

    __slots__ = ("__weakref__", "_hash", "obj")

    def __init__(self, obj: Any, number: int) -> None:
        self.obj = obj
        self._hash = number

    def __eq__(self, other: object) -> bool:
        if type(other) is not _ByEquality or type(self.obj) is not type(other.obj):
            return False
        return self.obj is other.obj or bool(self.obj == other.obj)

    def __hash__(self) -> int:
        return self._hash

    def complete(self) -> None:
        """Nothing follows from it."""

    def is_like(self, other: "_ByEquality") -> bool:
        """Whether another one is equal."""
        return self == other


_keys_by_equality: Interned[_ByEquality] = Interned()

_first_keys: WeakIdentityDict["weakref.ref[_ByEquality]"] = WeakIdentityDict()
"""Of objects with an `==` and a hash of their own, the key that each had first, as long as a structure has that key.

Equal keys are one object, so that the key lives if a structure was there before that has an equal object.
"""


def _by_equality(value: Any) -> _ByEquality:
    """The key of an object that can be hashed."""
    reference = _first_keys.get(value)
    known = None if reference is None else reference()
    if known is not None:
        return known
    number = hash(value)
    made = _keys_by_equality.intern(number, _ByEquality(value, number))
    with contextlib.suppress(TypeError):  # it cannot be referred to weakly
        _first_keys[value] = weakref.ref(made)
    return made


def _by_equality_of_copy(value: Any) -> _ByEquality:
    """The key of an object that may change: of a copy, whose hash says nothing."""
    return _ByEquality(copy_of(value, IdentityDict()), hash(type(value)))


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
    may_have_objects: bool

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
    if cls.__eq__ is object.__eq__ and cls is not functools.partial:  # which has parts
        if cls.__hash__ is not object.__hash__:
            _is_hashable(value)  # raises if taking the hash does
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
    if isinstance(value, (Tracer, jax.Ref)):
        return cls, IdentityKey(value)
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
    bits = _bits_of(value) if isinstance(value, _NUMBERS_AND_TEXTS) else None  # its `==` takes 0.0 for -0.0
    if _is_hashable(value):
        keys.note_class(value, cls)
        return cls, bits, _by_equality(value)
    keys.is_mutable = True
    return cls, bits, _by_equality_of_copy(value)


_NUMBERS_AND_TEXTS = (float, complex, int, str, bytes)


def _bits_of(value: Any) -> Any:
    """The number or the text that an instance of one of these classes, or of a subclass, is; two zeros may differ."""
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, complex):
        return struct.pack("dd", value.real, value.imag)
    base: Any = next(base for base in (int, str, bytes) if isinstance(value, base))
    instance: Any = value
    return base.__pos__(instance) if base is int else base.__getitem__(instance, slice(None))


def _is_only_its_items(cls: Any) -> bool:
    """Whether a class is a namedtuple that has no attributes and no `==` of its own."""
    return is_namedtuple(cls) and cls.__eq__ is tuple.__eq__ and cls.__dictoffset__ == 0


def _content_of_container(value: Any, base: type, keys: Keys) -> Any:
    """The content of a container: its parts and, where a subclass has an `==` of its own, what that says."""
    cls, container = type(value), _CONTAINERS[base]
    if container.is_mutable or (cls is not base and not _is_only_its_items(cls)) or cls is functools.partial:
        keys.may_have_objects = True
    if container.is_mutable:
        keys.is_mutable = True
    parts = keys.of_all(container.parts(value))
    content = parts if container.is_ordered else frozenset(parts)
    # The `==` of an array is one for each element.
    if cls is base or cls.__eq__ is base.__eq__ or base is np.ndarray:
        return cls, content
    _require_equality(value)
    return cls, content, _by_equality_of_copy(value)


def _key_of_jax_array(value: jax.Array) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.Array, str(value.dtype), value.shape, np.asarray(jax.random.key_data(value)).tobytes()
    return jax.Array, value.dtype, value.weak_type, value.shape, np.asarray(value).tobytes()


class Stability:
    """A value that was looked at: whether it stays the same, and what is in it that was not looked at yet."""

    __slots__ = ("is_settled", "parts")

    def __init__(self, value: Any) -> None:
        parts = _parts_of(value)
        self.is_settled = parts is not None
        self.parts = tuple(parts or ())


def cannot_change(value: Any, known: IdentityDict[Stability] | None = None) -> bool:
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
            found = known[stack[-1]] = Stability(stack[-1])
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
    container = _CONTAINERS.get(tuple if is_namedtuple(cls) else cls)
    if container is not None:
        return None if container.is_mutable else container.parts(value)
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


_INTERCHANGEABLE = BY_VALUE | {float, complex, range, types.MethodType, types.BuiltinFunctionType}


def objects_with_identity(value: Any) -> list[Any]:
    """The objects in a static value, or itself, of which an equal one is not as good.

    Whoever holds a model can tell whether a list or a config in it is still the one that was put there, and a class
    whose `==` looks at a part has more than was compared. Numbers, texts and tuples have nothing else, and functions
    and devices are equal only if they are one. What such an object holds is not entered.

    Returns:
        The objects, in the order in which they are met, each once.
    """
    found = IdentitySet()
    entered: IdentitySet | None = None
    num_met = 0
    stack = [value]
    while stack:
        part = stack.pop()
        cls: Any = type(part)
        if cls in _INTERCHANGEABLE:
            continue
        # Of a small value, it takes longer to note what was entered than to enter it again.
        num_met += 1
        if num_met == _MANY:
            entered = IdentitySet()
        if entered is not None and not entered.add(part):
            continue
        if cls is tuple:
            stack.extend(reversed(part))
            continue
        # A `partial` has the `==` of `object`, but is compared by what is in it.
        has_no_content = cls.__eq__ is object.__eq__ and cls is not functools.partial
        if has_no_content or issubclass(cls, (np.generic, enum.Enum, *_FIXED)):
            continue
        if cls in (slice, frozenset) or _is_only_its_items(cls):
            parts: Iterable[Any] | None = _CONTAINERS[cls if cls in _CONTAINERS else tuple].parts(part)
        else:
            parts = parts_of_frozen(part)
        if parts is None:
            found.add(part)
        else:
            stack.extend(reversed(list(parts)))
    return list(found)


_MANY = 200
