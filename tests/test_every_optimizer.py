"""Every transformation of optax takes, on a model with ties, the very steps that it takes on a dict without.

The transformations are found by running through optax, so that one of a new release shows up as a failure that asks for
arguments. Both programs are traced; where their jaxprs are not the same text, which costs no compilation, they are run.
"""

import functools
import inspect
import os
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import sharedtree as st
from tests import strategies as dags
from tests.optimizers import (
    ARGUMENTS,
    MASKS,
    OPTIONS,
    TRANSFORMATIONS,
    Layer,
    Model,
    arrays,
    distinct,
    flat,
    is_tied,
    net,
    nets,
    parts,
    transformation,
)

STEPS = 2
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


if hasattr(optax.contrib, "MuonDimensionNumbers"):
    dimensions = lambda tree: jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), tree)
    ARGUMENTS["scale_by_muon"] = lambda _: ()
    OPTIONS["scale_by_muon"] = lambda _: {"weight_dimension_numbers": dimensions}


def around(kind, name, make):
    """The transformation itself, one masked, or one of two in a partition, with masks for a model or for a dict."""
    mask = MASKS["function" if kind.endswith("by function") else "tree"](make)
    tx = transformation(name, mask)
    if kind.startswith("masked"):
        return optax.masked(tx, mask)
    if kind.startswith("one of two"):
        return optax.partition({True: tx, False: optax.sgd(0.1, momentum=0.9)}, mask)
    return tx


# These ask for the value of the whole model, or hold parameters of their own, and fail with a mask in plain optax, too.
ALONE = """
    lbfgs lookahead sophia scale_by_sophia hutchinson_estimator_diag_hessian scale_by_backtracking_linesearch
    scale_by_zoom_linesearch
"""


def loss(leaves):
    return sum(((0.5 + i) * (x - 0.1 * i) ** 2).sum() for i, x in enumerate(leaves))


def checked_loss(params):
    """What a line search calls: it gets whole models."""
    assert isinstance(params, dict) or (is_tied(params) and params.embed.activation is jnp.tanh)
    return loss(parts(params))


def steps(name, tx, make, *leaves):
    """The parameters after each step, and what the last state holds."""
    params = make(*leaves)
    batch = (4,) if name in ("differentially_private_aggregate", "dpsgd") else ()
    apply = st.apply_updates if make is net else optax.apply_updates
    if name == "lookahead":  # whose slow and fast weights begin as one model
        params = optax.LookaheadParams.init_synced(params)
    state = tx.init(params)
    history = []
    for step in range(STEPS):
        current = params.fast if name == "lookahead" else params
        gradient = make(*[jnp.cos(3 * x + step) * jnp.ones((*batch, *x.shape)) for x in parts(current)])
        extra = {"value": checked_loss(current), "grad": gradient, "value_fn": checked_loss}
        extra = {"sam": {}, "sophia": {"obj_fn": checked_loss}}.get(name, extra)
        updates, state = tx.update(gradient, state, params, **extra)
        params = apply(params, updates)
        current = params.fast if name == "lookahead" else params
        if make is net:
            assert is_tied(current)
            assert all(x.blocks[0] is x.blocks[1] for x in nets(state))
        history += parts(current)
        if name == "lookahead":
            assert params.fast is not params.slow
            history += parts(params.slow)
    return history, distinct(state)


KINDS = ["alone", "masked by tree", "masked by function", "one of two", "one of two by function"]


def kinds_of(i, name):
    """Each in one of the ways; in the thorough profile in all of them."""
    if name in ALONE.split():
        return KINDS[:1]
    return KINDS if THOROUGH else [KINDS[i % len(KINDS)]]


# Some of them daily, one of each sort.
DAILY = {"MultiSteps", "inject_hyperparams", "lookahead", "masked", "partition"}
CASES = [
    pytest.param(name, kind, id=f"{name}-{kind}", marks=() if name in DAILY else pytest.mark.slow)
    for i, name in enumerate(TRANSFORMATIONS)
    for kind in kinds_of(i, name)
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_steps_on_a_model_with_ties_equal_those_on_a_dict(name, kind):
    ours = functools.partial(steps, name, st.optimizer(around(kind, name, net)), net)
    theirs = functools.partial(steps, name, optax.with_extra_args_support(around(kind, name, flat)), flat)
    jaxprs = [jax.make_jaxpr(f)(*arrays(0)) for f in (ours, theirs)]
    assert [x.shape for x in jaxprs[0].out_avals] == [x.shape for x in jaxprs[1].out_avals]
    assert [x.dtype for x in jaxprs[0].out_avals] == [x.dtype for x in jaxprs[1].out_avals]
    if str(jaxprs[0]) != str(jaxprs[1]):
        for mine, expected in zip(*[jax.tree.leaves(jax.jit(f)(*arrays(0))) for f in (ours, theirs)], strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


TAKES_LABELS = [
    (name, parameter)
    for name, f in TRANSFORMATIONS.items()
    for parameter in inspect.signature(f).parameters
    if parameter.endswith(("mask", "labels", "dimension_numbers"))
]


def disagreeing(name, parameter, labels):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "adafactor":  # without it there is nothing to mask
            return optax.adafactor(0.1, weight_decay_rate=0.1, weight_decay_mask=labels)
        if not parameter.endswith("dimension_numbers"):
            return transformation(name, labels)
        required = [p for p in inspect.signature(TRANSFORMATIONS[name]).parameters.values() if p.default is p.empty]
        return TRANSFORMATIONS[name](*(0.1,) * len(required), **{parameter: labels})


if not THOROUGH:  # most hand their mask on to `add_decayed_weights`
    ALIKE = {name for name, parameter in TAKES_LABELS if parameter == "mask"} - {"masked", "freeze", "adamw"}
    TAKES_LABELS = [(name, parameter) for name, parameter in TAKES_LABELS if name not in ALIKE]


@pytest.mark.parametrize(("name", "parameter"), TAKES_LABELS, ids=str)
@pytest.mark.parametrize("place", ["array", "layer"])
@pytest.mark.parametrize("by", ["tree", "function"])
@pytest.mark.sampled(every=5)
def test_labels_that_disagree_at_a_tie_are_an_error(name, parameter, place, by):
    one, two = (True, False)
    if parameter.endswith("dimension_numbers"):
        numbers = optax.contrib.GaLoreDimensionNumbers if "galore" in name else optax.contrib.MuonDimensionNumbers
        one, two = numbers(0, 1), numbers(1, 0)
    other = two if place == "array" else one, two if place == "layer" else one
    labels = Model(Layer(one), [Layer(one), Layer(other[1]), [Layer(one)]], {"again": other[0]}, one)
    given = labels if by == "tree" else lambda _: labels
    if by == "function" and name in ("freeze", "selective_transform"):  # which take none
        return
    model = net(*arrays(0))
    gradient = net(*arrays(1))
    with pytest.raises(st.errors.InconsistentSharingError, match=r"are one parameter of the model") as caught:
        tx = st.optimizer(disagreeing(name, parameter, given))
        tx.update(gradient, tx.init(model), model)
    expected = {"array": (".embed.weight", ".head['again']"), "layer": (".blocks[0].weight", ".blocks[1].weight")}
    assert caught.value.paths == expected[place]
    if name != "selective_transform":  # which makes labels of its own out of them
        assert caught.value.treatments == (repr(one), repr(two))
    (fix,) = [line.strip() for line in str(caught.value).splitlines() if line.startswith("    ")]
    scope = {"sharedtree": st, "model": model}
    exec(fix, scope)
    tx.init(scope["model"])


def test_labels_shaped_like_a_callable_module_are_not_called():
    mlp = eqx.nn.MLP(2, 2, 3, 2, key=jax.random.key(0))
    mlp = st.tie(mlp, lambda m: (m.layers[1].bias, m.layers[0].bias))
    labels = jax.tree.map(lambda x: "matrix" if eqx.is_array(x) and x.ndim == 2 else "vector", mlp)
    tx = st.optimizer(optax.multi_transform({"matrix": optax.sgd(1.0), "vector": optax.sgd(2.0)}, labels))
    updates, _ = tx.update(st.tree.map(jnp.ones_like, mlp), tx.init(mlp), mlp)
    assert updates.layers[0].bias is updates.layers[1].bias
    np.testing.assert_array_equal(updates.layers[0].bias, jnp.full(3, -2.0))
    np.testing.assert_array_equal(updates.layers[2].weight, jnp.full((2, 3), -1.0))


def test_masks_that_do_not_fit_say_where():
    tx = st.optimizer(optax.masked(optax.sgd(0.1), Model(Layer(True), {"a": True}, True, True)))
    with pytest.raises(st.errors.SharingMismatchError, match=r"`mask` does not fit the tree at `\.blocks`"):
        tx.init(net(*arrays(0)))


LABELS = {
    "none": lambda tx: tx,
    "function": lambda tx: optax.masked(tx, lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree)),
    "prefix": lambda tx: optax.masked(tx, True),
}


@pytest.mark.parametrize("labels", LABELS)
def test_work_follows_nodes_and_not_paths(labels):
    model = dags.Record(jnp.ones((2, 2)), None)
    for _ in range(60):
        model = dags.Record(model, model)
    tx = st.optimizer(LABELS[labels](optax.adam(0.5)))
    state = tx.init(model)
    for _ in range(2):
        updates, state = tx.update(st.tree.map(jnp.ones_like, model), state, model)
        model = st.apply_updates(model, updates)
    (leaf,) = st.tree.leaves(model)
    np.testing.assert_allclose(leaf, jnp.zeros((2, 2)), atol=1e-5)


def test_tree_map_params_sees_the_parameters_of_a_state():
    tx = st.optimizer(optax.chain(optax.clip(0.1), optax.adam(0.1)))
    state = tx.init(net(*arrays(0)))
    shapes = optax.tree_map_params(tx, lambda x: x.shape, state, transform_non_params=lambda _: None)
    assert shapes[1][0].mu.blocks[1].weight == (2, 2)
    assert shapes[1][0].count is None


def test_the_transformation_that_was_given_is_not_changed():
    mask = Model(Layer(True), [Layer(True)] * 2 + [[Layer(True)]], {"again": True}, False)
    tx = optax.masked(optax.sgd(0.1), mask)
    cells = [cell.cell_contents for cell in tx.init.__closure__]
    ours = st.optimizer(tx)
    ours.init(net(*arrays(0)))
    assert all(a is cell.cell_contents for a, cell in zip(cells, tx.init.__closure__, strict=True))
