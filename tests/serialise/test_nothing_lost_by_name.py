"""What holds an array is never written as a name, whatever it is called and whatever global refers to it."""

import collections
import functools
import json
import types

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from jax import tree_util as jtu

import sharedtree as st
from sharedtree.serialise.values._encoding import encode
from sharedtree.serialise.values._written_by_name import MAX_OBJECTS
from tests.processes import program

from . import vanilla


@pytest.fixture(scope="module")
def groups():
    made = vanilla.subjects()
    for group in made.values():
        vanilla.bind(group)
    yield made
    for name in ["subject", *(name for group in made.values() for name in group)]:
        delattr(vanilla, name)


def arrays_of(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]


IN_A_NEW_PROCESS = program("load_vanilla_modules")


@pytest.mark.slow
def test_modules_come_back_in_a_new_process(python, groups, tmp_path):
    expected, types_of = {}, {}
    for label, group in groups.items():
        path = f"{label.replace(' ', '_')}.safetensors"
        st.save(tmp_path / path, group)
        types_of[path] = {name: type(each).__qualname__ for name, each in group.items()}
        expected |= {f"{name}:{i}": a for name, each in group.items() for i, a in enumerate(arrays_of(each))}
    np.savez(tmp_path / "expected.npz", **expected)
    (tmp_path / "groups.json").write_text(json.dumps(types_of))
    python(tmp_path, "-c", IN_A_NEW_PROCESS)


def test_markers_are_not_written(groups):
    for label in vanilla.REMAKING:
        for name in ("Gapped", "Nested"):
            module = next(each for key, each in groups[label].items() if key.endswith(name))
            data = st.to_bytes(module)
            assert b"Missing" not in data
            assert jax.tree.structure(st.from_bytes(data, trusted="tests")) == jax.tree.structure(module), (label, name)


def test_a_compiled_function_is_refused_whatever_its_name(groups):
    for source in ("forward", "module", "Linear"):
        vanilla.subject = eqx.filter_jit(groups["bound method"][f"bound_method_{source}"])
        with pytest.raises(st.errors.UnserialisableError, match="compiled"):
            st.to_bytes(vanilla.subject)


def named(name, decorate):
    """A function of this module, as if it stood below a decorator."""

    def function(x):
        return x

    function.__name__ = function.__qualname__ = name
    return decorate(function)


def own_default(x, table={"a": [1.0]}):  # noqa: B006
    return x


compiled, jitted, preserving = named("compiled", eqx.filter_jit), named("jitted", jax.jit), named("preserving", st.jit)
mapped, with_a_rule = named("mapped", eqx.filter_vmap), named("with_a_rule", jax.custom_jvp)
cached = named("cached", functools.lru_cache)
DECORATED = (compiled, mapped, with_a_rule, cached, preserving, jitted, own_default, jax.nn.relu, jnp.add, np.add)


def test_decorated_functions_without_arrays_are_names():
    preserving(vanilla.Gapped(jnp.ones(2)))  # what it remembers of calls is not what it holds
    back = st.from_bytes(st.to_bytes(list(DECORATED)), trusted=__name__)
    assert all(one is other for one, other in zip(back, DECORATED, strict=True))


def table_by_default(x, table=[jnp.ones(2)]):  # noqa: B006, B008
    return x


def table_by_keyword(x, *, table=np.ones(2)):  # noqa: B008
    return x


def closing(w):
    def function(x):
        return x * w

    return function


class Holder:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w


def with_attribute(x):
    return x


with_attribute.w = {"a": Holder(jnp.ones(2))}
in_a_cell = closing(jnp.ones(2))
of_a_key = closing(jax.random.key(0))
of_a_reference = closing(jax.new_ref(jnp.ones(2)))
with_kept_identities = st.jit(in_a_cell)
of_a_method = jax.vmap(vanilla.Gapped(jnp.ones(2)).forward)


REFUSED = [
    (table_by_default, "default of `table` → [0]"), (table_by_keyword, "default of `table`"),
    (with_attribute, "attribute `w` → ['a'] → attribute `w`"), (in_a_cell, "closure cell `w`"),
    (of_a_key, "closure cell `w`"), (of_a_reference, "closure cell `w`"),
    (with_kept_identities, "attribute `__wrapped__` → closure cell `w`"),
    (of_a_method, "attribute `__self__` → attribute `weight`"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "way"), REFUSED)
def test_functions_that_hold_arrays_are_refused(function, way):
    with pytest.raises(st.errors.UnserialisableError) as caught:
        st.to_bytes({"f": function})
    assert caught.value.paths[0].startswith("['f']")
    assert f"holds an array ({way})" in str(caught.value)
    assert "Make it a field" in str(caught.value)


class HoldingInItsClass:
    w = jnp.ones(2)


def test_the_search_has_an_end():
    global endless, large, through_code
    endless = closing([[i] for i in range(MAX_OBJECTS)])
    with pytest.raises(st.errors.UnserialisableError, match=r"more than 10,000 objects.*closure cell `w`"):
        st.to_bytes([endless])
    large = closing(list(range(10 * MAX_OBJECTS)))  # numbers hold nothing
    through_code = closing([HoldingInItsClass, vanilla, HoldingInItsClass(), in_a_global])  # code is not searched
    st.to_bytes([large, through_code])


def in_a_global(x):
    return x * WEIGHTS


WEIGHTS = jnp.ones(2)


def defaulting(value):
    def function(x, value=value):
        return x

    return function


def carrying(value):
    def function(x):
        return x

    function.value = value
    return function


HOLDING = [
    closing, defaulting, carrying, Holder, lambda v: functools.partial(print, v), lambda v: jax.jit(closing(v)),
    lambda v: jax.vmap(closing(v)), lambda v: functools.lru_cache(closing(v)), lambda v: jax.custom_vjp(closing(v)),
    lambda v: functools.wraps(closing(v))(lambda x: x), lambda v: [0, v], lambda v: {"a": v}, lambda v: (v, None),
    lambda v: collections.deque([v]), lambda v: types.MappingProxyType({"a": v}), lambda v: types.MethodType(print, v),
    vanilla.Gapped, vanilla.Wrapper, lambda v: eqx.Partial(print, v), lambda v: jtu.Partial(print, v),
    lambda v: types.SimpleNamespace(v=v), lambda v: property(closing(v)), lambda v: staticmethod(closing(v)),
]  # fmt: skip
CALLED = [0, 1, 2, 5, 6, 7, 8, 9, 17]
"""Which of them make something that is used as a function."""


@hypothesis.given(
    strategies.sampled_from(CALLED),
    strategies.lists(strategies.sampled_from(range(len(HOLDING))), max_size=4),
    strategies.sampled_from([jnp.ones(2), np.ones(2), jnp.float32(1)]),
)
def test_no_array_is_lost_however_it_is_held(outermost, inner, array):
    global subject
    value = array
    for number in [*inner, outermost]:
        value = HOLDING[number](value)
    subject = value
    try:
        manifest = encode([subject]).manifest
    except st.errors.UnserialisableError:
        return
    assert manifest["arrays"]
