"""PAX's tutorial on modules, step by step: classes written by hand as it writes them, and then `sharedtree.Module`.

Each step is a way to say which attributes are children. The models compute the same, so each is compared with the
function of bare arrays that it stands for.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st


def computed(w, b, x):
    return x @ w + b


def fitted(w, b, x, y, steps):
    """Gradient descent by vanilla JAX on bare arrays."""

    def loss(parameters):
        return ((computed(*parameters, x) - y) ** 2).mean()

    parameters = (w, b)
    for _ in range(steps):
        parameters = jax.tree.map(lambda p, g: p - 0.1 * g, parameters, jax.grad(loss)(parameters))
    return parameters


class ByHand:
    """Step 1. The children are listed by name, everything else is auxiliary data: lists, numbers, functions."""

    def __init__(self, w, b):
        self.w, self.b = w, b
        self.counter = 0
        self.children = ["w", "b"]

    def tree_flatten(self):
        children = [vars(self)[name] for name in self.children]
        rest = {name: value for name, value in vars(self).items() if name not in self.children}
        return children, (list(self.children), rest)

    @classmethod
    def tree_unflatten(cls, aux, children):
        names, rest = aux
        module = object.__new__(cls)
        vars(module).update(rest)
        vars(module).update(zip(names, children, strict=True))
        return module

    def __call__(self, x):
        self.counter += 1
        return computed(self.w, self.b, x)


jax.tree_util.register_pytree_node_class(ByHand)


class Registering:
    """Step 2. A base class whose subclasses register their sub-trees by a call, and are registered when defined."""

    def __init__(self):
        self._subtrees = ()

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_node_class(cls)

    def register_subtrees(self, *names):
        self._subtrees += names

    def tree_flatten(self):
        children = [vars(self)[name] for name in self._subtrees]
        return children, {name: value for name, value in vars(self).items() if name not in self._subtrees}

    @classmethod
    def tree_unflatten(cls, rest, children):
        module = object.__new__(cls)
        vars(module).update(rest)
        vars(module).update(zip(module._subtrees, children, strict=True))  # noqa: SLF001 -- its own class's
        return module


class Registered(Registering):
    def __init__(self, w, b):
        super().__init__()
        self.w, self.b = w, b
        self.counter = jnp.array(0)
        self.register_subtrees("w", "b", "counter")

    def __call__(self, x):
        self.counter = self.counter + 1
        return computed(self.w, self.b, x)


class Detecting(type):
    """Step 3. A metaclass that looks for the sub-trees once `__init__` has run."""

    def __call__(cls, *args):
        module = super().__call__(*args)
        found = [name for name, value in vars(module).items() if jax.tree_util.tree_leaves(value) and name != "name"]
        module.register_subtrees(*found)
        return module


class Detected(Registering, metaclass=Detecting):
    def __init__(self, w, b):
        super().__init__()
        self.w, self.b = w, b
        self.counter = jnp.array(0)
        self.name = "linear"

    def __call__(self, x):
        self.counter = self.counter + 1
        return computed(self.w, self.b, x)


class Linear(st.Module):
    """Step 4. The same with `sharedtree.Module`, where what is trainable is told from what is state."""

    def __init__(self, w, b):
        self.w, self.b = st.parameter(w), st.parameter(b)
        self.counter = jnp.array(0)
        self.name = "linear"

    def __call__(self, x):
        self.counter = self.counter + 1
        return computed(self.w, self.b, x)


CLASSES = [ByHand, Registered, Detected, Linear]
TRACED = CLASSES[1:]


def data():
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, [(3, 2), (2,), (5, 3), (5, 2)], strict=True)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_step_runs_under_jit_and_keeps_what_is_shared(cls):
    w, b, x, _ = data()
    layer = cls(w, b)
    pair = st.Dag([layer, layer])
    after = st.jit(lambda dag: dag)(pair).tree
    assert after[0] is after[1]
    np.testing.assert_allclose(st.jit(lambda m, x: m(x))(layer, x), computed(w, b, x), rtol=1e-6)


@pytest.mark.parametrize("cls", TRACED)
def test_a_counter_is_counted_by_assignment(cls):
    w, b, x, _ = data()

    def called(module):
        module(x)
        return module

    layer = cls(w, b)
    assert int(st.jit(called)(layer).counter) == 1
    assert int(layer.counter) == 0
    call = st.jit(lambda m, x: m(x), in_place=True)
    call(layer, x)
    call(layer, x)
    assert int(layer.counter) == 2


def test_a_counter_that_is_static_counts_traces_and_is_written_back():
    w, b, x, _ = data()
    layer = ByHand(w, b)
    st.jit(lambda m, x: m(x), in_place=True)(layer, x)
    assert layer.counter == 1


def test_the_trainable_part_and_the_rest():
    w, b, _, _ = data()
    module = Linear(w, b)
    parameters = module.parameters()
    assert (parameters.w, parameters.b, parameters.counter) == (w, b, None)
    assert parameters.name == "linear"
    assert jax.tree.structure(module.merge(parameters)) == jax.tree.structure(module)


def test_training_is_that_of_bare_arrays():
    w, b, x, y = data()
    module = Linear(w, b)

    def loss(parameters, module):
        module = module.merge(parameters)
        return ((module(x) - y) ** 2).mean(), module

    @st.jit
    def step(module):
        gradient, module = st.grad(loss, has_aux=True)(module.parameters(), module)
        return module.merge(st.tree.map(lambda p, g: p - 0.1 * g, module.parameters(), gradient))

    for _ in range(10):
        module = step(module)
    expected = fitted(w, b, x, y, 10)
    np.testing.assert_allclose(module.w, expected[0], rtol=1e-5)
    np.testing.assert_allclose(module.b, expected[1], rtol=1e-5)
    assert int(module.counter) == 10


class Sequence(st.Module):
    """Step 5. Modules in modules, found in a list that is filled after it was assigned, and one of them twice."""

    def __init__(self, layers):
        self.layers = []
        self.layers.extend(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def test_modules_in_modules():
    square, bias = jax.random.normal(jax.random.key(1), (3, 3)), jnp.zeros(3)
    shared = Linear(square, bias)
    model = Sequence([shared, Linear(2 * square, bias + 1), shared])
    x = data()[2]
    expected = x
    for w, b in [(square, bias), (2 * square, bias + 1), (square, bias)]:
        expected = jnp.tanh(computed(w, b, expected))
    np.testing.assert_allclose(st.jit(lambda m, x: m(x), in_place=True)(model, x), expected, rtol=1e-5)
    assert model.layers[0] is model.layers[2] is shared
    assert [int(layer.counter) for layer in model.layers] == [2, 1, 2]
    # `bias` is one array at three places of the layers, two of which are one object.
    assert len(st.tree.leaves(model.parameters())) == 4
