"""What is known of a class goes with it, unless JAX's registry keeps the class anyway.

Notebooks and programs that make classes as they run (configurations, namedtuples of results) would otherwise grow for
ever, with all that the classes hold.
"""

import collections
import dataclasses
import enum
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from tests.garbage import collect_all
from tests.kinds import Noted

W = jnp.ones(2)


def by_equality():
    def alike(self, other):
        return type(other) is type(self)

    return type("Made", (), {"__eq__": alike, "__hash__": lambda self: 1})


def frozen():
    return dataclasses.make_dataclass("Made", ["a"], frozen=True, namespace={"__init__": lambda self: None})


CLASSES = {
    "known by address": lambda: type("Made", (), {}),
    "known by `==`": by_equality,
    "a frozen dataclass": frozen,
    "an enum": lambda: enum.Enum("Made", "a b"),
    "a partial": lambda: type("Made", (functools.partial,), {"__new__": lambda cls: super(cls, cls).__new__(cls, len)}),
    "a container": lambda: type("Made", (dict,), {}),
    "a metaclass": lambda: type("Made", (type,), {}),
    "a tuple with names": lambda: collections.namedtuple("Made", "a b", defaults=(2, 1.0)),
    "a subclass of one": lambda: type("Made", (collections.namedtuple("Base", "a", defaults=(2,)),), {}),
}


def instance_of(cls):
    if issubclass(cls, enum.Enum):
        return cls.a
    return cls("Static", (), {}) if issubclass(cls, type) else cls()


def use(cls):
    made = instance_of(cls)
    model = [Noted(W, made), Noted(W, [made]), made]
    st.tree.unflatten(st.tree.structure(model), st.tree.leaves(model))
    st.jit(lambda m: m[0].weight)(model[:2])
    st.jit(lambda m: m)(Noted(W, cls))
    if issubclass(cls, tuple):
        st.jit(lambda values: values)(made)


@pytest.mark.slow
def test_classes_are_let_go():
    references = []
    for name, make in CLASSES.items():
        for _ in range(3):
            cls = make()
            use(cls)
            references.append((name, weakref.ref(cls)))
            del cls
    jax.clear_caches()
    collect_all()
    assert [name for name, reference in references if reference() is not None] == []


def test_what_takes_the_place_of_a_class_is_not_taken_for_it():
    """Classes come and go at a few addresses, and each is met as if it were the first."""
    structures = []
    for i in range(8):
        made = [instance_of(make()) for make in CLASSES.values()]
        structure = st.tree.structure([[Noted(W, each), each] for each in made])
        assert structure == st.tree.structure([[Noted(W, each), each] for each in made])
        back = st.tree.unflatten(structure, [W] * structure.num_leaves)
        assert all(type(b.note) is type(c) is type(a) for a, (b, c) in zip(made, back, strict=True))
        if i % 2:
            structures.append(structure)
        del made, back, structure
        gc.collect()
    assert len({id(structure) for structure in structures}) == 4  # alive in the list
