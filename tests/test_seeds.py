"""The cases of the documents that started the project."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st


class Counter:
    """A hand-written mutable pytree, flattened as PAX's tutorial does: children by name, the rest in a list."""

    def __init__(self, value):
        self.value = value
        self.names = ["value"]
        self.calls = []

    def tree_flatten(self):
        children = [v for k, v in vars(self).items() if k in self.names]
        rest = {k: v for k, v in vars(self).items() if k not in self.names}
        return children, (list(self.names), rest)

    @classmethod
    def tree_unflatten(cls, aux, children):
        names, rest = aux
        module = object.__new__(cls)
        vars(module).update(zip(names, children, strict=True))
        vars(module).update(rest)
        return module


jax.tree_util.register_pytree_node_class(Counter)


@jax.tree_util.register_pytree_node_class
class TwoCounters:
    def __init__(self, first, second):
        self.first = first
        self.second = second

    def __call__(self):
        self.first.value = self.first.value + 1
        return self.second.value

    def tree_flatten(self):
        return (self.first, self.second), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def two_counters():
    counter = Counter(jnp.array(0))
    return TwoCounters(counter, counter)


@pytest.mark.parametrize("transform", [lambda f: f, st.jit, st.checkpoint, st.preserve_identities(eqx.filter_jit)])
def test_two_counters_that_are_one_object(transform):
    def call(module):
        seen = module()
        return seen, module

    seen, module = transform(call)(two_counters())
    assert seen == 1
    assert module.first is module.second
    assert module.second.value == 1
    seen, module = transform(call)(module)
    assert seen == 2


def test_two_counters_in_place():
    module = two_counters()
    counter = module.first
    count = st.preserve_identities(jax.jit, policy=st.Policy(in_place=True))(lambda m: m())
    assert count(module) == 1
    assert count(module) == 2
    assert module.first is module.second is counter
    assert counter.value == 2


def test_mutation_of_one_of_two_arguments_that_are_one_object():
    m = Counter(jnp.array(1.0))

    @st.preserve_identities(jax.jit)
    def f(m1, m2):
        assert m1 is m2
        m1.value = m1.value * 10
        return m1, m2

    m1, m2 = f(m, m)
    assert m1 is m2
    assert m1.value == 10
    assert m.value == 1  # not in place


def test_one_object_alone_and_in_a_container():
    m = Counter(jnp.array(1.0))
    same = st.jit(lambda m, others: (m is others["teacher"], others)[1])(m, {"teacher": m})
    assert same["teacher"] is m
    assert st.jit(lambda m, others: jnp.array(m is others["teacher"]))(m, {"teacher": m})


class Linear:
    """PAX's tutorial, explicit registration of sub-trees, unmodified but for the names."""

    def __init__(self, in_dim, out_dim, key):
        self.w = jax.random.normal(key, (in_dim, out_dim))
        self.b = jnp.zeros(out_dim)
        self.counter = 0
        self.parameter_names = ["w", "b"]

    def tree_flatten(self):
        children = {k: vars(self)[k] for k in self.parameter_names}
        others = {k: v for k, v in vars(self).items() if k not in self.parameter_names}
        return list(children.values()), (list(children), others)

    @classmethod
    def tree_unflatten(cls, aux, children):
        names, others = aux
        module = object.__new__(cls)
        for name, value in others.items():
            setattr(module, name, value)
        for name, value in zip(names, children, strict=True):
            setattr(module, name, value)
        return module

    def __call__(self, x):
        self.counter = self.counter + 1
        return x @ self.w + self.b


jax.tree_util.register_pytree_node_class(Linear)


def test_pax_module_trains_with_a_shared_layer(getkey):
    layer = Linear(3, 3, getkey())
    model = [layer, layer]
    x = jnp.ones((2, 3))

    def loss(model, x):
        for each in model:
            x = jnp.tanh(each(x))
        return (x**2).mean()

    @st.jit
    def step(dag, x):
        value, gradient = st.value_and_grad(lambda dag: loss(dag.tree, x))(dag)
        return value, st.apply_updates(dag, st.tree.map(lambda g: -0.1 * g, gradient))

    dag = st.Dag(model)
    losses = []
    for _ in range(5):
        value, dag = step(dag, x)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)
    assert dag.tree[0] is dag.tree[1]

    # The same by hand, with one copy of the parameters.
    def loss_of_one(params):
        w, b = params
        return (jnp.tanh(jnp.tanh(x @ w + b) @ w + b) ** 2).mean()

    params = (layer.w, layer.b)
    for _ in range(5):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of_one)(params))
    np.testing.assert_allclose(dag.tree[0].w, params[0], rtol=1e-5)


def test_auxiliary_lists_are_copied_for_each_trace_and_seen_when_they_change():
    m = Counter(jnp.array(1.0))
    traces = []

    @st.jit
    def f(m):
        traces.append(list(m.calls))
        m.calls.append("traced")
        return m.value * len(m.calls)

    assert f(m) == 1
    assert m.calls == []
    assert f(m) == 1
    assert traces == [[]]
    m.calls.append("by the caller")
    assert f(m) == 2
    assert f(m) == 2
    assert traces == [[], ["by the caller"]]


def _layers(key):
    x = jnp.ones(4)
    mlp = eqx.nn.MLP(4, 3, 5, 2, key=key)
    dropout = eqx.nn.Dropout(0.5)
    attention = eqx.nn.MultiheadAttention(2, 4, key=key)
    gru = eqx.nn.GRUCell(4, 3, key=key)
    conv = eqx.nn.Conv2d(1, 2, 3, key=key)
    tanh = eqx.nn.Lambda(jnp.tanh)
    sequential = eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=key), tanh, eqx.nn.Dropout(0.1), tanh])
    return {
        "MLP": (mlp, lambda m: m(x)),
        "Dropout": (dropout, lambda m: m(x, key=key)),
        "MultiheadAttention": (attention, lambda m: m(x[None], x[None], x[None])),
        "GRUCell": (gru, lambda m: m(x, jnp.zeros(3))),
        "Conv2d": (conv, lambda m: m(jnp.ones((1, 5, 5)))),
        "Lambda": (tanh, lambda m: m(x)),
        "Sequential": (sequential, lambda m: m(x, key=key)),
    }


@pytest.mark.parametrize("name", list(_layers(jax.random.key(0))))
def test_equinox_layers_run_under_jit_unchanged(name, getkey):
    layer, call = _layers(getkey())[name]
    f = st.preserve_identities(jax.jit)(lambda m: (call(m), m))
    value, same = f(layer)
    np.testing.assert_allclose(value, eqx.filter_jit(call)(layer), rtol=1e-6)
    assert jax.tree.structure(same) == jax.tree.structure(layer)
    both = st.preserve_identities(jax.jit)(lambda pair: (call(pair[0]), pair[0] is pair[1] and pair))
    assert both((layer, layer))[1][0] is both((layer, layer))[1][1]


def test_batch_norm_with_state(getkey):
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        again: eqx.nn.BatchNorm

    norm = eqx.nn.BatchNorm(3, "batch", mode="batch")
    model = Model(eqx.nn.Linear(4, 3, key=getkey()), norm, norm)
    state = eqx.nn.State(model)
    x = jax.random.normal(getkey(), (8, 4))

    def apply(model, state, x):
        def one(x, state):
            x, state = model.norm(model.linear(x), state)
            return model.again(x, state)

        return jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    expected, expected_state = eqx.filter_jit(apply)(model, eqx.nn.State(model), x)
    traces = []

    @st.preserve_identities(jax.jit)
    def f(model, state, x):
        traces.append(model.norm is model.again)
        return apply(model, state, x)

    for _ in range(2):
        out, new_state = f(model, state, x)
        np.testing.assert_allclose(out, expected, rtol=1e-5)
    assert traces == [True]
    for ours, vanilla in zip(jax.tree.leaves(new_state), jax.tree.leaves(expected_state), strict=True):
        np.testing.assert_allclose(ours, vanilla, rtol=1e-5)
