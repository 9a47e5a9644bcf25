"""Warnings name the function they are about, and Python's own filters tell two functions apart."""

import functools
import gc
import linecache
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree.core import _errors
from sharedtree.core._errors import definition_of, definition_of_caller, warn_about
from tests.strategies import Pair


class Net(eqx.Module):
    embed: jax.Array
    head: jax.Array

    def __call__(self, x):
        return self.embed * x

    def lose(self):
        return double(self)


def tied():
    w = jnp.arange(3.0)
    return Net(w, w)


def double(tree):
    return jax.tree.map(lambda x: 2 * x, tree)


def plain(net):
    return double(net)


@functools.lru_cache
def _decorated():
    @functools.wraps(plain)
    def around(*args):
        return plain(*args)

    return around


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (plain, "plain"),
        (functools.partial(functools.partial(plain)), "plain"),
        (_decorated(), "plain"),
        (Net.lose, "Net.lose"),
        (Net(1, 2).lose, "Net.lose"),
        (Net(1, 2), "Net.__call__"),
        (st.jit(st.checkpoint(plain)), "plain"),
    ],
)
def test_the_innermost_function_is_named(function, name):
    definition = definition_of(function)
    assert definition.name == name
    assert definition.filename == __file__
    assert definition.module == __name__
    assert f"def {name.rpartition('.')[2]}(" in linecache.getline(__file__, definition.lineno)
    assert str(definition) == f"`{name}` ({__file__}:{definition.lineno})"


def test_functions_without_code_of_their_own_have_a_name_too():
    warnings.simplefilter("ignore")
    for function in (len, jnp.add, functools.partial(max), str.upper):
        assert definition_of(function).name
        warn_about(definition_of(function), "text", UserWarning)
    # The caller is the innermost frame outside the libraries.
    assert definition_of_caller().name == "test_functions_without_code_of_their_own_have_a_name_too"
    assert jax.eval_shape(lambda: definition_of_caller().name == "nobody" or 1.0).shape == ()


def shown(*functions):
    """What Python shows under its default filter of the warnings that these functions give."""
    with warnings.catch_warnings(record=True) as record:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        for function in functions:
            function()
    return record


def test_retrace_warnings_too():
    def retraced(f):
        for k in range(5):
            f(Pair(jnp.ones(2), k))

    one, two = st.jit(lambda m: m.first * m.second), st.jit(lambda m: m.first + m.second)
    warned = shown(lambda: retraced(one), lambda: retraced(two))
    assert [w.category for w in warned] == [st.RetraceWarning] * 2
    assert all(str(__file__) in str(w.message) and w.filename == __file__ for w in warned)


def run_cell():
    """What a notebook does with a cell: the same text under the same name, compiled and run again."""
    namespace = {"jax": jax, "__name__": "__main__"}
    code = compile("def step(m):\n    return jax.tree.map(lambda x: 2 * x, m)\n", "<cell 1>", "exec")
    exec(code, namespace)
    return namespace["step"]


def test_each_function_warns_once_for_each_definition():
    def one(net):
        return double(net)

    def two(net):
        return double(net)

    warned = shown(*[lambda f=f: st.jit(f)(tied()) for f in (one, two, one)])
    assert [w.lineno for w in warned] == [f.__code__.co_firstlineno for f in (one, two)]
    assert {w.filename for w in warned} == {__file__}
    assert len({str(w.message).partition(". ")[0] for w in warned}) == 2
    # A cell that is run again warns again.
    cells = [run_cell(), run_cell()]
    warned = shown(*[lambda f=f: st.jit(f)(tied()) for f in (*cells, cells[0])])
    assert [(w.filename, w.lineno) for w in warned] == [("<cell 1>", 1)] * 2
    assert "`step` (<cell 1>:1)" in str(warned[0].message)


def test_the_once_filter_and_filters_by_module_tell_functions_apart():
    f, g = (lambda net: double(net)), run_cell()
    with warnings.catch_warnings(record=True) as record:
        warnings.resetwarnings()
        warnings.simplefilter("once")
        st.jit(f)(tied())
        st.jit(g)(tied())
    assert len(record) == 2
    with warnings.catch_warnings(record=True) as record:
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", category=st.UntiedWarning, module="__main__")
        st.jit(lambda net: double(net))(tied())
        st.jit(run_cell())(tied())
    assert [w.filename for w in record] == [__file__]


def test_nothing_is_remembered_of_functions_that_are_gone():
    before = len(_errors._shown)
    for _ in range(20):
        definition_of(run_cell())
    gc.collect()
    assert len(_errors._shown) <= before + 1
