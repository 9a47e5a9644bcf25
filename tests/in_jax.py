"""Comparisons with what vanilla `jax.tree` does with the same tree."""

import collections.abc
import dataclasses

import jax
import numpy as np

import sharedtree as st
from tests.strategies import is_array


def assert_same_tree(x, y):
    """Compares structures and leaves, which must be one object or equal."""
    assert jax.tree.structure(x) == jax.tree.structure(y)
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        assert a is b or (type(a) is type(b) and np.array_equal(a, b))


def attributes_of(obj):
    """The attributes in an instance's dictionary and in its slots, whatever its class says of them."""
    names = [name for base in type(obj).__mro__ for name in base.__dict__.get("__slots__", ())]
    slots = [(name, object.__getattribute__(obj, name)) for name in names if name in dir(obj) and hasattr(obj, name)]
    own = object.__getattribute__(obj, "__dict__") if type(obj).__dictoffset__ else {}
    return list(own.items()), slots


def outcome_of(function):
    """Returns the result and None, or None and the class and text of the error."""
    try:
        return function(), None
    except Exception as error:
        return None, (type(error), str(error))


def assert_as_in_jax(obj, objects=()):
    """Compares `st.tree` with `jax.tree`: the leaves, and the object built of other leaves, or the error of both.

    `objects` are classes, besides dataclasses, that are compared by their attributes.
    """
    flat, error = outcome_of(lambda: jax.tree.flatten(obj))
    for _ in range(3):
        ours, our_error = outcome_of(lambda: st.tree.flatten(obj))
        assert our_error == error
        if error is not None:
            continue
        new = [np.full(2, float(i)) for i in range(len(flat[0]))]
        assert all(a is b for a, b in zip(flat[0], ours[0], strict=True))
        expected, expected_error = outcome_of(lambda: jax.tree.unflatten(flat[1], new))
        built, built_error = outcome_of(lambda: st.tree.unflatten(ours[1], new))
        assert expected_error == built_error
        if expected is not None:
            assert_same_content(built, expected, objects)


def assert_same_content(built, expected, objects):
    """Compares two built objects by content. Each has dictionaries and traces of its own."""
    assert type(built) is type(expected)
    if type(expected).__module__.startswith("flax.nnx.tracers"):
        assert built is not expected
        assert built == expected
    elif isinstance(expected, list | tuple):
        for one, other in zip(built, expected, strict=True):
            assert_same_content(one, other, objects)
    elif dataclasses.is_dataclass(expected) or isinstance(expected, objects):
        for its, others in zip(attributes_of(built), attributes_of(expected), strict=True):
            assert_same_content(its, others, objects)
    elif isinstance(expected, collections.abc.Mapping):
        assert built is not expected or not isinstance(expected, dict)
        assert_same_content(list(built.items()), list(expected.items()), objects)
    else:
        assert built is expected or (not is_array(expected) and built == expected)
