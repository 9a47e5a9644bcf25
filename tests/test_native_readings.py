"""A structure is kept for what was read when it was made, whatever the objects are a moment later.

A tree that is first met is read more than once: natively, to find out that it is new, and in Python. Between any two
reads, and within one, another thread may change it and change it back. Here a sibling does that, each time it is taken
apart, so that nothing depends on when threads are switched. What is remembered must be right for every later tree.
"""

import dataclasses
import functools
import itertools

import equinox as eqx
import jax
import pytest
from hypothesis import example, given, strategies as hst

import sharedtree as st
from sharedtree.core import _walk
from sharedtree.core._pack_and_unpack import Tags, native, pack
from sharedtree.core._static_values import Static
from tests.kinds import Slots, Unhashable, W, nnx
from tests.strategies import Pair
from tests.walks import knows


class One:
    """A static value that is known by address."""


class Other:
    """Likewise, of the same layout."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["static"])
@dataclasses.dataclass
class Record:
    w: object
    static: object


@jax.tree_util.register_pytree_node_class
class Own:
    """A class that its author registered."""

    def __init__(self, w, static):
        self.w, self.static = w, static

    def tree_flatten(self):
        return (self.w,), self.static

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, static)


class Mutable(st.Module):
    def __init__(self, w, static):
        self.w, self.static = w, static


def set_static(target, version):
    object.__setattr__(target, "static", (version, "text"))


def set_half(target, version):
    """A text of which there is no key: half of a surrogate pair."""
    object.__setattr__(target, "static", ("text", "\ud800")[version])


def set_class(target, version):
    object.__setattr__(target.static, "__class__", (One, Other)[version])


def set_items(target, version):
    target.static[:] = [version]


def set_content(target, version):
    target.static.value = version


def set_absent(target, version):
    vars(target).pop("static", None)
    vars(target).update({"static": 1} if version else {})


class Bound(eqx.Module):
    w: object
    static: object = eqx.field(static=True)


def with_static(cls, make_static):
    return lambda: cls(W, make_static())


CLASSES: tuple[type, ...] = (Record, Slots, Own, Mutable, Bound)
if nnx is not None:

    class OfNnx(nnx.Module):
        def __init__(self, w, static):
            self.w, self.static = w, static

    CLASSES += (OfNnx,)

TARGETS = {
    **{f"a static value of {cls.__name__}": (with_static(cls, lambda: None), set_static) for cls in CLASSES},
    **{f"a text of {cls.__name__}": (with_static(cls, lambda: "text"), set_half) for cls in CLASSES},
    **{f"the class of a static value of {cls.__name__}": (with_static(cls, One), set_class) for cls in CLASSES},
    **{f"a list in {cls.__name__}": (with_static(cls, list), set_items) for cls in CLASSES if cls is not Mutable},
    **{f"what has only `==`, in {c.__name__}": (with_static(c, lambda: Unhashable(0)), set_content) for c in CLASSES},
    "a field that is there or not": (with_static(Bound, lambda: None), set_absent),
    "a key": (dict, lambda target, version: (target.clear(), target.update({"w": W, ("a", "b")[version]: 1}))),
    "a length": (list, lambda target, version: target.__setitem__(slice(None), [W, 1, 2][: 2 + version])),
    "what is traced or not": (lambda: [W], lambda target, version: target.__setitem__(0, (W, "static")[version])),
}


class Changing:
    """Changes another object whenever it is taken apart."""


_versions = itertools.repeat(0)
_change = None


def take_apart(obj):
    _change(next(_versions))
    return (), None


jax.tree_util.register_pytree_node(Changing, take_apart, lambda aux, children: Changing())


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", TARGETS)
@example(versions=[0, 0, 0, 1])  # another in Python than natively
@given(versions=hst.lists(hst.integers(0, 1), min_size=2, max_size=6))
def test_what_is_remembered_is_right_for_every_later_tree(name, versions):
    global _versions, _change
    make, change = TARGETS[name]
    # A class of its own for each example, so that all of its trees are new.
    target, wrapper = make(), type("Wrapper", (list,), {})
    jax.tree_util.register_pytree_node(wrapper, lambda obj: (tuple(obj), None), lambda _, xs: wrapper(xs))
    _versions, _change = itertools.chain(versions, itertools.repeat(versions[-1])), functools.partial(change, target)
    try:
        for _ in range(len(versions)):
            pack(wrapper([Changing(), target, Changing(), target, Changing()]), Tags())
        for version in (0, 1, 0, 1):
            _versions = itertools.repeat(version)
            change(target, version)
            tree = wrapper([Changing(), target, Changing(), target, Changing()])
            leaves, records, _ = _walk.walk(tree, _walk.Tags())
            ours, structure = pack(tree, Tags())
            assert structure.records == records
            assert all(a is b for a, b in zip(ours, leaves, strict=True))
            if native is not None:
                assert knows(tree) is not (change is set_half and version)
    finally:
        _versions, _change = itertools.repeat(0), None


@given(versions=hst.lists(hst.integers(0, 1), min_size=1, max_size=8))
def test_a_static_value_that_changes_while_it_is_read_is_one_value(versions):
    """Its key is that of its copy, which nobody else has."""

    class Toggling:
        """Asked whether it equals itself before it is hashed or copied."""

        def __eq__(self, other):
            value[0] = next(sequence)
            return self is other

        def __hash__(self):
            return 1

    sequence = itertools.chain(versions, itertools.repeat(versions[-1]))
    value = [0, Toggling(), 0]
    static = Static(value)
    assert static == Static(static.peek())
    assert static.peek() == static.thaw()


def test_a_class_whose_place_another_one_takes_is_another_class():
    """Classes come and go, perhaps at one address, and an object is of each in turn."""
    value, seen = One(), []
    model = Pair(Bound(W, value), W)
    for i in range(20):
        value.__class__ = type(f"Version{i}", (One,), {})
        structure = st.tree.structure(model)
        with_walk = _walk.walk(model, _walk.Tags())[1]
        assert structure.records == with_walk
        seen.append(structure)
    assert len(set(map(id, seen))) == 20  # alive in `seen`
