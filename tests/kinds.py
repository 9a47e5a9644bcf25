"""A small tree of every kind that the walks tell apart, and of every kind that ends a walk. For tests that count.

Nothing here is random and nothing is made twice: what a test repeats thousands of times is the walk, not the making.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import sharedtree as st

try:
    from flax import nnx
except ImportError:
    nnx = None

from tests.strategies import Layer, Mutable, Pair, Point, Record

W = jnp.ones(2)


class Noted(eqx.Module):
    """A module with a static value of any kind."""

    weight: Any
    note: Any = eqx.field(static=True)


class Free(st.Module):
    """A mutable module with any attributes."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


@dataclasses.dataclass
class Setting:
    """A static value that may change."""

    value: Any
    other: Any


class Unregistered:
    """A class that JAX does not know."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


st.register_node(Unregistered, lambda obj: (obj.parts, "aux"), lambda _, parts: Unregistered(*parts))


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    """A class with keys and mutable auxiliary data; neither a namedtuple nor an object with a `__dict__`."""

    __slots__ = ("notes", "weight")
    _fields = ("weight",)

    def __init__(self, weight: Any, notes: Any) -> None:
        self.weight, self.notes = weight, notes

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("weight"), self.weight)], self.notes

    @classmethod
    def tree_unflatten(cls, notes: Any, children: Any) -> "Keyed":
        return cls(*children, notes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(slots=True, frozen=True)
class FrozenSlots:
    """A dataclass without a `__dict__`."""

    weight: Any
    size: int = dataclasses.field(metadata={"static": True})


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["static"])
@dataclasses.dataclass(slots=True)
class Slots:
    """A dataclass without a `__dict__`, whose fields can be assigned to."""

    w: Any
    static: Any


class ByContent:
    """Static, with an `==` of its own, so that its address says nothing."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return type(other) is ByContent and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)


class Unhashable:
    """Static, with an `==` of its own and no hash."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Unhashable and self.value == other.value


class OwnDict(dict):
    """A dictionary of a class of its own."""


class LyingDict(dict):
    """Claims to have what it lacks."""

    def __getitem__(self, name: Any) -> Any:
        return 5


class Incomparable:
    """Static, with an `==` that fails."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("not to be compared")

    def __hash__(self) -> int:
        return 1


@jax.tree_util.register_pytree_node_class
class Failing:
    """Cannot be taken apart."""

    def tree_flatten(self) -> Any:
        raise LookupError("from the flatten function")

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Failing":
        return cls()


def _text(size: int) -> str:
    return "x" * size


def made(cls: type, **attributes: Any) -> Any:
    """An instance with these attributes, past the constructor."""
    obj = object.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(obj, name, value)
    return obj


def _cycle() -> Any:
    inner: list[Any] = [W]
    inner.append({"back": inner})
    return made(Pair, first=W, second=inner)


def _holding_itself() -> Any:
    note: list[Any] = []
    note.append(note)
    return made(Noted, weight=W, note=note)


_DICTIONARIES = {"b": W, "a": {"z": 1.5, "y": W}, "c": {f"name{i * 7 % 20}": W for i in range(20)}}

KINDS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a leaf": lambda: W,
    "numbers": lambda: [1, 1.5, True, 2j, np.float32(1), np.ones(2)],
    "sequences": lambda: [(W, [W, ()]), [[]], (None, W)],
    "dictionaries": lambda: dict(_DICTIONARIES),
    "dictionaries by numbers": lambda: {2: W, 1: {3: W, (1, "a"): 2}},
    "dictionaries by half surrogates": lambda: {"\udfff": W, "a": {"\ud800": 1}},
    "other containers": lambda: [
        collections.OrderedDict(b=W, a=1),
        collections.defaultdict(list, b=W),
        collections.deque([W], 3),
    ],
    "namedtuples": lambda: Point(Point(W, 1), W),
    "Equinox": lambda: eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)),
    "Equinox, with ties": lambda: (lambda shared: Pair(shared, [shared, shared.parts]))(Layer(W, jax.nn.relu, [W], 2)),
    "Equinox, attributes missing": lambda: [made(Layer, weight=W), made(Layer)],
    "registered": lambda: Mutable(a=W, b=Mutable(c=[W])),
    "registered, with keys": lambda: Keyed(W, ("note", 1)),
    "registered, mutable auxiliary data": lambda: Keyed(W, ["note", {"a": 1}]),
    "a dataclass": lambda: Record(W, Record(W, 1, "inner")),
    "a dataclass with slots": lambda: [FrozenSlots(W, 1), FrozenSlots(FrozenSlots(W, 2), 1)],
    "a partial": lambda: jax.tree_util.Partial(jnp.sin, W),
    "a mutable module": lambda: Free(
        weight=st.parameter(W), inner=[Free(calls=st.state_field(0), size=(2, "a"))], name="x"
    ),
    "a mutable module, static containers": lambda: Free(weight=W, sizes=[1, 2], nested=((1,), {"a": None, "b": 1})),
    "a mutable module, past its assignments": lambda: made(Free, weight=W, name="x"),
    "a view": lambda: [W, st.View(jnp.transpose, W), {"again": st.View(jnp.add, W, st.View(jnp.abs, W))}],
    "register_node": lambda: Unregistered(W, Unregistered(W)),
    "statics by address": lambda: Noted(W, (jax.nn.relu, np.dtype("float32"), int, 2**80, _text(10_000))),
    "statics, many": lambda: Noted(W, tuple(range(1_001))),
    "statics, deep": lambda: Noted(W, functools.reduce(lambda inner, _: (inner,), range(40), 1)),
    "statics, mutable": lambda: Noted(W, [1, {"a": [2.5, None]}, jnp.tanh]),
    "statics, half surrogates": lambda: Noted(W, ["\ud800", {"\udfff": ("\ud800",)}]),
    "statics that are not settled": lambda: Noted(W, ByContent((1, 2))),
    "statics that are not settled, mutable": lambda: Noted(W, {1, 2}),
    "static containers of their own classes": lambda: Noted(W, collections.OrderedDict(a=1)),
    "static arrays": lambda: Noted(W, np.arange(3)),
    "statics known by their content": lambda: Noted(
        W, [Setting(1.0, (jax.nn.relu, [np.float32(1)])), Setting(Point(1, "a"), jax.tree.structure([1]))]
    ),
}

if nnx is not None:
    KINDS["NNX"] = lambda: [nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.List([nnx.Param(W) for _ in range(12)])]
    KINDS["NNX, split"] = lambda: nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))

ENDS: dict[str, Callable[[], Any]] = {
    "a cycle": _cycle,
    "a static value without ==": lambda: Noted(W, Incomparable()),
    "a flatten function that raises": lambda: [W, Mutable(a=W, b=Failing())],
    "a static list that holds itself": _holding_itself,
}
"""Trees that no walk packs."""
