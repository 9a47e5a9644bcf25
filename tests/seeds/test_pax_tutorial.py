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


def data():
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, [(3, 2), (2,), (5, 3)], strict=True)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_step_runs_under_jit_keeps_what_is_shared_and_counts_by_assignment(cls):
    w, b, x = data()
    layer = cls(w, b)

    def called(layers):
        return layers[0](x), layers

    out, (one, other) = st.jit(called)((layer, layer))
    np.testing.assert_allclose(out, computed(w, b, x), rtol=1e-6)
    assert one is other
    assert (int(one.counter), int(layer.counter)) == (1, 0)
    call = st.jit(lambda m, x: m(x), in_place=True)
    call(layer, x)
    # A counter that is static counts traces, and what it counted is written back.
    assert int(layer.counter) == 1
    call(layer, x)
    assert int(layer.counter) == 2
