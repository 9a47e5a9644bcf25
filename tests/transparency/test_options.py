"""Every option of every transform: the same results and the same errors as the vanilla transform, and as early."""

import functools
import os
from typing import Any

import equinox as eqx
import jax
import pytest

import sharedtree as st
from tests.transparency.options import ROWS, Row
from tests.transparency.outcome import FILTERED, TRANSFORMS, Data, Model, Raised, Registered, Returned, outcome, vec

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
EACH = [pytest.param(transform, id=name) for name, transform in TRANSFORMS.items()]


def rows_of(transform: Any) -> dict[str, Row]:
    return {name: row for name, row in ROWS.items() if row.transform is transform}


@pytest.mark.parametrize("transform", EACH)
def test_options_on_values(transform):
    wrong = {}
    for name, (_, f, args, options, kwargs, fails) in rows_of(transform).items():
        want = outcome(lambda: transform(f, **options)(*args(), **kwargs()))
        assert fails is None or fails == (type(want) is Raised), f"the row {name!r} itself is wrong: {want}"
        found = [outcome(lambda: st.preserve_identities(transform)(f, **options)(*args(), **kwargs()))]
        if options and "policy" not in options:  # which is an option of `preserve_identities` itself
            found.append(outcome(lambda: st.preserve_identities(transform, **options)(f)(*args(), **kwargs())))
        # What the transform refuses when it gets the function, before any call, is refused then.
        if fails:
            want_early = outcome(lambda: transform(f, **options) and None)
            found_early = outcome(lambda: st.preserve_identities(transform)(f, **options) and None)
            if found_early != want_early:
                wrong[f"{name}, before any call"] = want_early, found_early
        if any(each != want for each in found):
            wrong[name] = want, found
    assert wrong == {}


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


# Of a module in a differentiated argument what has no gradient is left out, where vanilla JAX refuses the argument. And
# JAX does not take apart what has such keys.
NOT_IN_MODULES = ("grad of a key", "mixed dict keys")

# The error says more where modules are involved; it is still of the type that vanilla raises.
PREFIX_DOES_NOT_FIT = {
    *("in_axes of another shape", "in_axes with another key", "in_axes below a leaf"),
    *("out_axes of another shape", "out_axes with another key", "filter_vmap bad axes"),
}


def classes_for(transform: Any, i: int) -> list[Any]:
    """Where a row's arrays are: in one of the classes that JAX knows, in both in the slow leg, and in Equinox's."""
    known = [Registered, Data] if THOROUGH else [(Registered, Data)[i % 2]]
    return [*known, Model] if transform in FILTERED.values() else known


@pytest.mark.parametrize("transform", EACH)
def test_options_on_modules(transform):
    wrong = {}
    for i, (name, (_, f, args, options, kwargs, _)) in enumerate(rows_of(transform).items()):
        is_early = type(outcome(lambda: transform(f, **options) and None)) is Raised
        if is_early or name in NOT_IN_MODULES or not any(eqx.is_array(x) for x in jax.tree.leaves((args(), kwargs()))):
            continue
        for cls in classes_for(transform, i):
            call = lambda t: t(opened(f), **options)(*enclosed(args(), cls), **enclosed(kwargs(), cls))
            want, found = (outcome(lambda: call(t)) for t in (transform, st.preserve_identities(transform)))
            if name in PREFIX_DOES_NOT_FIT:
                is_right = type(want) is type(found) is Raised and isinstance(found.error, type(want.error))
            else:
                is_right = found == want
            if not is_right:
                wrong[name, cls.__name__] = want, found
    assert wrong == {}


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
def test_donated_inputs_are_deleted_and_no_others(transform, options, how):
    def f(x, y):
        return jax.tree.map(lambda a: a + 1, (x, y))

    def call(transform):
        arrays = {name: [vec(), vec(), vec()] for name in ("x", "y")}
        values = {name: [bare, Registered(one), Model(other)] for name, (bare, one, other) in arrays.items()}
        wrapped = transform(f, **options)
        result = wrapped(**values) if how else wrapped(*values.values())
        return result, jax.tree.map(lambda x: x.is_deleted(), arrays)

    want = outcome(lambda: call(transform))
    assert type(want) is Returned
    assert outcome(lambda: call(st.preserve_identities(transform))) == want


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
