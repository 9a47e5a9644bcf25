"""Every option of every transform: the same results and the same errors as the vanilla transform, and as early."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from tests.transparency.options import FC, FG, FJ, FV, FVG, ROWS
from tests.transparency.outcome import Data, Model, Raised, Registered, Returned, outcome, vec


@pytest.mark.parametrize("name", ROWS)
def test_options_on_values(name):
    transform, f, args, options, kwargs, fails = ROWS[name]
    want = outcome(lambda: transform(f, **options)(*args(), **kwargs()))
    assert fails is None or fails == (type(want) is Raised), f"the row itself is wrong: {want}"
    assert outcome(lambda: st.preserve_identities(transform)(f, **options)(*args(), **kwargs())) == want
    if "policy" not in options:  # which is an option of `preserve_identities` itself
        assert outcome(lambda: st.preserve_identities(transform, **options)(f)(*args(), **kwargs())) == want


def enclosed(value: Any, cls: Any) -> Any:
    """Each array in a module of its own."""
    return jax.tree.map(lambda x: cls(x) if isinstance(x, jax.Array) else x, value)


def opened(f: Any) -> Any:
    """The function, for arguments that are enclosed."""
    is_module = lambda x: isinstance(x, Registered | Data | Model)

    @functools.wraps(f)
    def on_modules(*args, **kwargs):
        args, kwargs = jax.tree.map(lambda x: x.leaf if is_module(x) else x, (args, kwargs), is_leaf=is_module)
        return f(*args, **kwargs)

    return on_modules


# Of a module in a differentiated argument what has no gradient is left out, where vanilla JAX refuses the argument.
REFUSED_ONLY_OUTSIDE_MODULES = ("grad of a key",)

# The error says more where modules are involved; it is still of the type that vanilla raises.
PREFIX_DOES_NOT_FIT = (
    "in_axes of another shape",
    "in_axes with another key",
    "in_axes below a leaf",
    "out_axes of another shape",
    "out_axes with another key",
    "filter_vmap bad axes",
)


def same_with_modules(name: str, cls: Any) -> None:
    transform, f, args, options, kwargs, _ = ROWS[name]
    call = lambda t: t(opened(f), **options)(*enclosed(args(), cls), **enclosed(kwargs(), cls))
    want = outcome(lambda: call(transform))
    found = outcome(lambda: call(st.preserve_identities(transform)))
    if name in PREFIX_DOES_NOT_FIT:
        assert isinstance(want, Raised)
        assert isinstance(found, Raised)
        assert isinstance(found.error, type(want.error))
    else:
        assert found == want


@pytest.mark.parametrize("cls", [Registered, Data])
@pytest.mark.parametrize("name", [n for n in ROWS if callable(ROWS[n].f) and n not in REFUSED_ONLY_OUTSIDE_MODULES])
def test_options_on_registered_classes(name, cls):
    same_with_modules(name, cls)


@pytest.mark.parametrize("name", [n for n in ROWS if ROWS[n].transform in (FJ, FG, FVG, FV, FC)])
def test_options_on_equinox_modules(name):
    same_with_modules(name, Model)


# --- donation ----------------------------------------------------------------------------------------------------

DONATIONS = [
    (jax.jit, {"donate_argnums": 0}, {}),
    (jax.jit, {"donate_argnums": (0, 1)}, {}),
    (jax.jit, {"donate_argnums": -1}, {}),
    (jax.jit, {"donate_argnames": "y"}, {}),
    (jax.jit, {"donate_argnames": ("x", "y")}, {"by_name": True}),
    (jax.jit, {"donate_argnums": 1}, {"by_name": True}),
    (jax.jit, {}, {}),
    (eqx.filter_jit, {"donate": "all"}, {}),
    (eqx.filter_jit, {"donate": "all-except-first"}, {}),
    (eqx.filter_jit, {"donate": "all-except-first"}, {"by_name": True}),
    (eqx.filter_jit, {"donate": "none"}, {}),
]


@pytest.mark.parametrize(("transform", "options", "how"), DONATIONS)
@pytest.mark.parametrize("cls", [None, Registered, Model])
def test_donated_inputs_are_deleted_and_no_others(transform, options, how, cls):
    def f(x, y):
        return jax.tree.map(lambda a: a + 1, (x, y))

    def call(transform):
        arrays = {"x": vec(), "y": vec()}
        values = arrays if cls is None else {name: cls(array) for name, array in arrays.items()}
        wrapped = transform(f, **options)
        result = wrapped(**values) if how else wrapped(*values.values())
        return result, {name: array.is_deleted() for name, array in arrays.items()}

    want = outcome(lambda: call(transform))
    assert type(want) is Returned
    assert outcome(lambda: call(st.preserve_identities(transform))) == want


# --- when -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name].fails])
def test_wrong_options_are_errors_as_early(name):
    """What the transform refuses when it gets the function, before any call, is refused then."""
    transform, f, _, options, _, _ = ROWS[name]
    want = outcome(lambda: transform(f, **options) and None)
    assert outcome(lambda: st.preserve_identities(transform)(f, **options) and None) == want


# --- what only the wrapped transforms have ---------------------------------------------------------------------------


@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 1), (1, 0), (-1,)])
def test_argnums_with_equinox_modules(argnums):
    """`eqx.filter_grad` differentiates its first argument only, so for it the arguments are one tuple."""

    def f(m, n):
        return (m.leaf * n.leaf * n.inside).sum()

    m, n = Model(vec(), "text"), Model(vec() + 1, 3)
    both = eqx.filter_grad(lambda pair: f(*pair))((m, n))
    want = both[argnums] if isinstance(argnums, int) else tuple(both[i] for i in argnums)
    found = outcome(lambda: st.grad(f, argnums=argnums)(m, n))
    assert found == outcome(lambda: want)


def test_the_policy_of_checkpoint_goes_with_the_function():
    policy = jax.checkpoint_policies.everything_saveable
    with pytest.raises(TypeError, match="goes with the function"):
        st.preserve_identities(jax.checkpoint, policy=policy)
    want = outcome(lambda: jax.checkpoint(jnp.sin, policy=policy)(vec()))
    assert outcome(lambda: st.preserve_identities(jax.checkpoint)(jnp.sin, policy=policy)(vec())) == want
