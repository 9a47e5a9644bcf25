"""Every kind of leaf, in every place, through every transform: what comes out is what the vanilla transform gives."""

import collections
import functools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.transparency.leaves import (
    GRADS,
    IN_A_DEQUE,
    JITS,
    NOT_IN_A_LOSS,
    TRIED,
    UNTRACEABLE,
    apart,
    mixture,
    of_one,
    put,
)
from tests.transparency.outcome import (
    FILTERED,
    LEAVES,
    PLACES,
    TRANSFORMS,
    Data,
    Model,
    Registered,
    Returned,
    changed,
    differing,
    differing_alone,
    loss_of,
    oracle,
    outcome,
)


def is_vmaps_own_affair(transform: Any, module: str | None, leaf: str) -> bool:
    """`jax.vmap` needs an array to know how often to map, and returns NumPy arrays as they are; `filter_vmap` not."""
    own = ("python", "string", "function", "numpy array", "numpy ints", "numpy float64")
    return transform is jax.vmap and module == "equinox" and leaf.startswith(own)


def law_holds_for(transform: Any, module: str | None, leaf: str) -> bool:
    """Whether the law is meant to hold. The exceptions are tested one by one below, and listed in the docs."""
    if module == "jax" and (leaf in UNTRACEABLE or transform in (jax.grad, jax.value_and_grad)):
        return False
    return not is_vmaps_own_affair(transform, module, leaf)


# To Equinox's filters a bare deque is static, and cannot be hashed; we compare it by what is in it.
CASES = [
    (transform, place)
    for transform in TRIED.values()
    for place in PLACES
    if place != "deque" or not transform.__name__.startswith("filter_")
]


def both(transform: Any, place: str, f: Any) -> tuple[Any, Any]:
    """A function under the transform that says what is right, and under ours."""
    return oracle(transform, PLACES[place].module)(f), st.preserve_identities(transform)(f)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("transform", "place"), CASES)
def test_values_and_errors_are_those_of_the_oracle(transform, place):
    leaves = IN_A_DEQUE if place == "deque" else LEAVES
    fits = [leaf for leaf in leaves if law_holds_for(transform, PLACES[place].module, leaf)]
    theirs, ours = both(transform, place, of_one(transform, place))
    alone = put(place, [leaf for leaf in fits if leaf in apart(transform, place)])
    together = put(place, [leaf for leaf in fits if leaf not in alone])
    wrong = differing_alone(alone, theirs, ours)
    assert wrong | (differing(together, theirs, ours) if together else {}) == {}


def diagonal() -> Iterator[Any]:
    """Each leaf with each transform, in one of the places, each of which has had each leaf and each transform."""
    places = [place for place in PLACES if place != "deque"]
    for i, leaf in enumerate(LEAVES):
        for j, (name, transform) in enumerate(TRIED.items()):
            place = places[(i + j + i // 4) % len(places)]
            if law_holds_for(transform, PLACES[place].module, leaf) and leaf not in apart(transform, place):
                slow = () if (i + j) % 8 == 0 else pytest.mark.slow
                yield pytest.param(transform, place, leaf, id=f"{name}-{place}-{leaf}", marks=slow)


@pytest.mark.parametrize(("transform", "place", "leaf"), [*diagonal()])
def test_a_leaf_alone(transform, place, leaf):
    """Where nothing is traced, or everything is an array, there is more that could be different."""
    theirs, ours = both(transform, place, of_one(transform, place))
    assert differing(put(place, [leaf]), theirs, ours) == {}


def are_arrays(leaf: str) -> bool:
    return leaf not in UNTRACEABLE and not leaf.startswith(("python", "numpy"))


@pytest.mark.parametrize(("transform", "place"), [case for case in CASES if case[0] in JITS and case[1] != "deque"])
def test_what_jit_returns_unchanged_is_what_vanilla_returns(transform, place):
    theirs, ours = both(transform, place, lambda t: t)
    for is_in in (are_arrays, lambda leaf: leaf not in UNTRACEABLE):
        assert differing(put(place, filter(is_in, LEAVES)), theirs, ours) == {}


ARRAYS = [name for name in LEAVES if name not in UNTRACEABLE and not name.startswith("python")]


def as_structs(tree: Any) -> Any:
    def struct(leaf):
        weak = getattr(leaf, "weak_type", False)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=weak)

    return jax.tree.map(struct, tree)


@pytest.mark.parametrize("place", [place for place in PLACES if place != "deque"])
def test_structs_stand_for_arrays(place):
    is_equinox = PLACES[place].module == "equinox"
    trees = put(place, ARRAYS)
    structs = as_structs(trees)
    f = lambda trees: {name: mixture(tree, (jnp.arange(2), None)) for name, tree in trees.items()}
    shapes = functools.partial(eqx.filter_eval_shape, f) if is_equinox else jax.jit(f).eval_shape
    assert differing(structs, shapes, st.jit(f).eval_shape) == {}
    # `eqx.filter_jit(f).lower` takes a struct for a static value, so there the arrays themselves say what to expect.
    theirs = eqx.filter_jit(f) if is_equinox else lambda trees: jax.jit(f).lower(as_structs(trees)).compile()(trees)
    assert differing(trees, theirs, lambda trees: st.jit(f).lower(as_structs(trees)).compile()(trees)) == {}


@pytest.mark.parametrize("transform", JITS)
def test_what_is_compiled_ahead_takes_and_refuses_the_same(transform):
    x = jnp.zeros(3)
    given = [jnp.ones(3), jnp.zeros(4), jnp.arange(3), jnp.zeros(3, jnp.bfloat16), [1.0], None]
    theirs, ours = (t(changed).lower(x).compile() for t in (transform, st.preserve_identities(transform)))
    assert [each for each in given if outcome(lambda: ours(each)) != outcome(lambda: theirs(each))] == []


WITHOUT_GRADIENT = [transform for transform in TRANSFORMS.values() if transform not in GRADS]


@pytest.mark.parametrize("transform", WITHOUT_GRADIENT)
def test_what_jax_cannot_trace_is_static_in_a_registered_class(transform):
    for value in [LEAVES[leaf]() for leaf in UNTRACEABLE]:
        result = st.preserve_identities(transform)(lambda t, x: (t, x + 1))(Registered(value), jnp.zeros(2))
        assert outcome(lambda: result[0].leaf) == outcome(lambda: value)
        assert result[0].name == "registered"
        assert outcome(lambda: result[1]) == outcome(lambda: jnp.ones(2))


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad])
def test_gradient_of_a_registered_class_has_none_where_nothing_is_differentiable(transform):
    def is_differentiable(x):
        return isinstance(x, float | complex) or (
            eqx.is_array_like(x) and not isinstance(x, bool | int) and jax.dtypes.issubdtype(x.dtype, np.inexact)
        )

    def theirs(trees):
        own, rest = eqx.partition(trees, is_differentiable)
        return transform(lambda own: loss_of(eqx.combine(own, rest)))(own)

    ours = st.preserve_identities(transform)(loss_of)
    assert differing_alone(put("registered", NOT_IN_A_LOSS), theirs, ours) == {}
    assert differing(put("registered", [leaf for leaf in LEAVES if leaf not in NOT_IN_A_LOSS]), theirs, ours) == {}


def test_jax_vmap_treats_an_equinox_module_as_it_treats_what_is_in_it():
    """It needs an array, and NumPy's are none."""
    for leaf in ("python float", "string", "function"):
        with pytest.raises(ValueError, match="must be passed at least one argument"):
            st.vmap(lambda t: t)(Model(LEAVES[leaf]()))
        assert type(st.vmap(lambda t: t, axis_size=2)(Model(LEAVES[leaf]()))) is Model
    f = lambda x: (x, changed(x))
    for leaf in ("numpy array", "numpy ints", "numpy float64"):
        value = LEAVES[leaf]()
        want = outcome(lambda: jax.vmap(f)(value))
        assert outcome(lambda: st.vmap(lambda m: f(m.leaf))(Model(value))) == want
        both = st.vmap(lambda m: (m, Model(changed(m.leaf))))
        assert outcome(lambda: tuple(m.leaf for m in both(Model(value)))) == want


@pytest.mark.parametrize("cls", [Model, Registered, Data])
@pytest.mark.parametrize("transform", JITS)
def test_a_deque_inside_a_module_is_a_container(transform, cls):
    traced = []

    @st.preserve_identities(transform)
    def f(m):
        traced.append(m.leaf[0])
        return cls(collections.deque([m.leaf[0] + 1], 4))

    result = f(cls(collections.deque([jnp.zeros(2)])))
    assert isinstance(traced[0], jax.core.Tracer)
    assert result.leaf.maxlen == 4
    assert outcome(lambda: list(result.leaf)) == outcome(lambda: [jnp.ones(2)])


def test_outside_modules_arguments_and_results_follow_the_transform_itself():
    model = Model(2.0)
    array, same = st.jit(lambda m, x: (1.5, m))(model, 1)
    assert outcome(lambda: array) == outcome(lambda: jax.jit(lambda: 1.5)())
    assert type(same.leaf) is float
    number, same = st.preserve_identities(eqx.filter_jit)(lambda m, x: (1.5, m))(model, 1)
    assert type(number) is float
    assert type(same.leaf) is float
    traces = []
    f = st.jit(lambda model, x: traces.append(x) or model(x))
    model = Model(jnp.arange(3.0))
    for x in (1.0, 2.0, 3.0):
        assert outcome(lambda: f(model, x)) == outcome(lambda: jax.jit(lambda a, b: a * b)(model.leaf, x))
    (x,) = traces
    assert isinstance(x, jax.core.Tracer)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_an_array_at_two_bare_positions_is_two_values(transform):
    z = jnp.zeros(3)
    f = (lambda x, y: loss_of((x, y + 1))) if transform in GRADS else (lambda x, y: (x, y + 1, {"y": y}))
    options = {"argnums": (0, 1)} if transform in (jax.grad, jax.value_and_grad) else {}
    want = outcome(lambda: transform(f, **options)(z, z))
    assert type(want) is Returned
    assert outcome(lambda: st.preserve_identities(transform)(f, **options)(z, z)) == want


def test_an_array_at_two_bare_positions_is_two_inputs():
    z = jnp.zeros(3)
    found = []
    jaxpr = st.jit(lambda x, y: found.append(x is y) or x + y).trace(z, z).jaxpr
    assert found == [False]
    assert len(jaxpr.jaxpr.invars) == len(jax.jit(lambda x, y: x + y).trace(z, z).jaxpr.jaxpr.invars) == 2
    donating = lambda jit: jit(lambda x, y: (x + 1, y + 1), donate_argnums=(0, 1))
    want, found = (outcome(lambda: (lambda z: donating(jit)(z, z))(jnp.zeros(3))) for jit in (jax.jit, st.jit))
    assert found == want
    assert type(want) is not Returned


def test_the_oracle_tells_transforms_apart():
    """The comparison itself can fail: dtype, weak type, Python type and error are all seen."""
    assert outcome(lambda: jnp.zeros(3)) != outcome(lambda: np.zeros(3, np.float32))
    assert outcome(lambda: jnp.asarray(1.0)) != outcome(lambda: jnp.float32(1.0))
    assert outcome(lambda: 1.0) != outcome(lambda: 1)
    assert outcome(lambda: jnp.zeros(2)) != outcome(lambda: jax.device_put(jnp.zeros(2), jax.devices()[0]))
    assert outcome(lambda: 1 / 0) != outcome(lambda: int("x"))
    assert outcome(lambda: int("x")) != outcome(lambda: [].index(1))
    assert FILTERED[jax.jit] is eqx.filter_jit
