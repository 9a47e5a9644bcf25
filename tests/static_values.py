"""Static values of every kind, each as a function that makes one: called twice, it makes two that are equal.

For tests that ask what becomes of the user's objects. `PARTS` says which objects in such a value are the user's own.
"""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LOCK = threading.Lock()


class Identity:
    """Compared by identity, and holding something that is not to be copied."""

    def __init__(self) -> None:
        self.act = jax.nn.relu
        self.lock = threading.Lock()


ONE_OBJECT = Identity()


@dataclasses.dataclass
class Config:
    """What an ordinary program has as its configuration: mutable, and therefore without a hash."""

    act: Any = jax.nn.relu
    widths: Any = (8, 8)
    device: Any = dataclasses.field(default_factory=lambda: jax.devices()[0])


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    act: Any = jax.nn.relu
    width: int = 8


@dataclasses.dataclass
class Labelled:
    """Compared by a part of it."""

    width: int
    label: Any = dataclasses.field(default_factory=object, compare=False)


@dataclasses.dataclass(frozen=True)
class FrozenLabelled:
    width: int
    label: Any = dataclasses.field(default_factory=object, compare=False)


class LooseHashable:
    """Its `==` looks at a part, and so does its hash."""

    def __init__(self, width: int) -> None:
        self.width, self.rest = width, object()

    def __eq__(self, other: object) -> bool:
        return type(other) is LooseHashable and self.width == other.width

    def __hash__(self) -> int:
        return hash(self.width)


class LooseUnhashable:
    """Its `==` looks at a part, and it has no hash."""

    def __init__(self, width: int) -> None:
        self.width, self.act, self.rest = width, jax.nn.gelu, object()

    def __eq__(self, other: object) -> bool:
        return type(other) is LooseUnhashable and self.width == other.width

    __hash__ = None


class SlottedUnhashable:
    """As above, without a `__dict__`."""

    __slots__ = ("act", "width")

    def __init__(self, width: int) -> None:
        self.width, self.act = width, jax.nn.gelu

    def __eq__(self, other: object) -> bool:
        return type(other) is SlottedUnhashable and self.width == other.width

    __hash__ = None


class TaggedStr(str):
    """A text with an attribute."""

    tag: Any = None


class TaggedFloat(float):
    """A number with an attribute."""

    tag: Any = None


class OwnDict(dict):
    """A dictionary by attribute."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class StrictList(list):
    """A list whose name counts, too."""

    def __init__(self, parts: Any, name: str) -> None:
        super().__init__(parts)
        self.name = name

    def __eq__(self, other: object) -> bool:
        return list.__eq__(self, other) and self.name == getattr(other, "name", None)

    __hash__ = None


class Shape(tuple):
    """A tuple that is made of its items, and not of a sequence of them."""

    __slots__ = ()

    def __new__(cls, *parts: Any) -> "Shape":
        return tuple.__new__(cls, parts)


Point = collections.namedtuple("Point", ["x", "y"])


class Color(enum.Enum):
    RED = 1


def _closure() -> Any:
    return lambda x: x


CLOSURE = _closure()


def _with(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


KINDS: dict[str, Callable[[], Any]] = {
    "number": lambda: 3,
    "text": lambda: "".join(["re", "lu"]),
    "function": lambda: jax.nn.relu,
    "closure": lambda: CLOSURE,
    "jitted": lambda: jnp.sin,
    "class": lambda: np.float32,
    "jax scalar type": lambda: jnp.float32,
    "dtype": lambda: np.dtype("float32"),
    "enum": lambda: Color.RED,
    "device": lambda: jax.devices()[0],
    "lock": lambda: LOCK,
    "module": lambda: jnp,
    "object": lambda: ONE_OBJECT,
    "method": lambda: ONE_OBJECT.__init__,
    "config": Config,
    "frozen config": FrozenConfig,
    "config in a list": lambda: [Config()],
    "config in a dict": lambda: {"config": Config(), "act": jax.nn.relu},
    "config in a tuple": lambda: (Config(), 1),
    "config of configs": lambda: Config(act=FrozenConfig(), widths=[Config(), {"lock": LOCK}]),
    "labelled": lambda: Labelled(3),
    "frozen, labelled": lambda: FrozenLabelled(3),
    "loose": lambda: LooseHashable(3),
    "loose, unhashable": lambda: LooseUnhashable(3),
    "slots, unhashable": lambda: SlottedUnhashable(3),
    "list": lambda: [1, [jax.nn.relu]],
    "dict": lambda: {"act": jax.nn.relu, 1: {2}},
    "ordered dict": lambda: collections.OrderedDict(act=jax.nn.relu, b=[1]),
    "default dict": lambda: collections.defaultdict(list, act=jax.nn.relu),
    "deque": lambda: collections.deque([jax.nn.relu], 3),
    "set": lambda: {"a", "b"},
    "frozenset": lambda: frozenset(["a", FrozenConfig()]),
    "counter": lambda: collections.Counter("abca"),
    "namedtuple": lambda: Point(jax.nn.relu, [1]),
    "slice": lambda: slice(0, 8, None),
    "range": lambda: range(0, 8, 2),
    "namespace": lambda: types.SimpleNamespace(act=jax.nn.relu, lock=LOCK),
    "argparse": lambda: argparse.Namespace(act=jax.nn.relu, width=[8]),
    "user dict": lambda: collections.UserDict(act=jax.nn.relu),
    "dict subclass": lambda: OwnDict(act=jax.nn.relu, inner=OwnDict(a=[1])),
    "list subclass": lambda: StrictList([jax.nn.relu], "name"),
    "tuple subclass": lambda: Shape(1, jax.nn.relu, FrozenConfig()),
    "partial": lambda: functools.partial(jax.nn.gelu, approximate=False),
    "partial with a list": lambda: functools.partial(sorted, [1, 2]),
    "array": lambda: np.arange(3.0),
    "array of objects": lambda: np.array([jax.nn.relu, [1]], object),
    "masked array": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "bytes": lambda: bytearray(b"abc"),
    "date": lambda: datetime.datetime(2026, 11, 27, tzinfo=datetime.UTC),
    "decimal": lambda: decimal.Decimal("1.50"),
    "fraction": lambda: fractions.Fraction(1, 3),
    "path": lambda: pathlib.PurePosixPath("a/b"),
    "pattern": lambda: re.compile("a+"),
    "text subclass": lambda: _with(TaggedStr("relu"), tag=jax.nn.relu),
    "float subclass": lambda: _with(TaggedFloat(-0.0), tag=jax.nn.relu),
    "exception": lambda: ONE_ERROR,
    "mapping proxy": lambda: PROXY,
}

ONE_ERROR = ValueError("kept")
PROXY = types.MappingProxyType({"act": jax.nn.relu})

ONLY_IN_AUX = ("list", "dict", "config in a list", "config in a dict", "config in a tuple", "array", "masked array",
               "ordered dict", "default dict", "deque", "array of objects", "namedtuple")  # fmt: skip
"""What is no static leaf where a field may hold a node or an array."""

VALUES = ("number", "text", "method", "slice", "range", "namedtuple", "config in a tuple")
"""What carries no identity: of these, an equal one is as good, but for the objects in it."""

_ATOMS = (int, float, complex, str, bytes, type(None), slice, range)


def own_objects(value: Any) -> Iterator[Any]:
    """The objects in a value that have no content of their own, in order: whoever put them there finds them again."""
    seen: list[Any] = []
    stack = [value]
    while stack:
        part = stack.pop()
        if type(part) in _ATOMS or any(part is other for other in seen):
            continue
        seen.append(part)
        if isinstance(part, functools.partial):
            stack.extend([part.func, *part.args, *part.keywords.values()])
        elif type(part).__eq__ is object.__eq__:
            yield part
        elif isinstance(part, np.ndarray):
            stack.extend(part.ravel().tolist() if part.dtype.hasobject else [])
        elif isinstance(part, dict):
            stack.extend(part.values())
        elif isinstance(part, (list, tuple, set, frozenset, collections.deque)):
            stack.extend(part)
        elif hasattr(part, "__slots__") and not hasattr(part, "__dict__"):
            stack.extend(getattr(part, name) for name in part.__slots__ if hasattr(part, name))
        else:
            stack.extend(vars(part).values() if hasattr(part, "__dict__") else [])
