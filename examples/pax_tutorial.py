"""PAX's tutorial on modules, step by step, and what is left of it with `sharedtree.Module`.

A mutable module is a pytree: some of its attributes are children, the rest is structure. Each step has another way to
say which; the last has none to say. The layer is the same in all of them and holds two weights and a counter.
"""

from typing import Any

import jax
import jax.numpy as jnp

import sharedtree as st


class ByHand:
    """Step 1: the children are listed by name."""

    def __init__(self, weight: jax.Array, bias: jax.Array) -> None:
        self.weight, self.bias = weight, bias
        self.calls = jnp.array(0)
        self.children = ["weight", "bias", "calls"]

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls = self.calls + 1
        return x @ self.weight + self.bias

    def tree_flatten(self) -> Any:
        rest = {name: value for name, value in vars(self).items() if name not in self.children}
        return [vars(self)[name] for name in self.children], (list(self.children), rest)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Any:
        names, rest = aux
        module = object.__new__(cls)
        vars(module).update(rest)
        vars(module).update(zip(names, children, strict=True))
        return module


jax.tree_util.register_pytree_node_class(ByHand)


class Finding(type):
    """Step 2: a metaclass registers each class, and looks for the children when `__init__` is done."""

    def __init__(cls, name: str, bases: Any, namespace: Any) -> None:
        super().__init__(name, bases, namespace)
        jax.tree_util.register_pytree_node_class(cls)

    def __call__(cls, *args: Any) -> Any:
        module = super().__call__(*args)
        module.children = [name for name, value in vars(module).items() if isinstance(value, jax.Array)]
        return module


class Found(ByHand, metaclass=Finding):
    """The same layer, which lists nothing."""

    def __init__(self, weight: jax.Array, bias: jax.Array) -> None:
        self.weight, self.bias = weight, bias
        self.calls = jnp.array(0)


class Linear(st.Module):
    """Step 3: what is trainable is marked, and found by `parameters()`."""

    def __init__(self, weight: jax.Array, bias: jax.Array) -> None:
        self.weight, self.bias = st.parameter(weight), st.parameter(bias)
        self.calls = jnp.array(0)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls = self.calls + 1
        return x @ self.weight + self.bias


class Twice(st.Module):
    """Step 4: modules in modules, and here one of them twice."""

    def __init__(self, layer: Linear) -> None:
        self.layers = [layer, layer]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def main() -> None:
    weight, bias, x = jnp.eye(3) / 2, jnp.zeros(3), jnp.ones((4, 3))
    for cls in (ByHand, Found, Linear):
        layer = cls(weight, bias)
        call = st.jit(lambda layer, x: layer(x), in_place=True)
        call(layer, x)
        call(layer, x)
        print(f"{cls.__name__}: called {int(layer.calls)} times")
        assert int(layer.calls) == 2

    model = Twice(Linear(weight, bias))

    def loss(parameters: Twice, model: Twice) -> tuple[jax.Array, Twice]:
        model = model.merge(parameters)
        return (model(x) ** 2).mean(), model

    @st.jit
    def step(model: Twice) -> tuple[Twice, jax.Array]:
        (value, model), gradient = st.value_and_grad(loss, has_aux=True)(model.parameters(), model)
        return model.merge(st.tree.map(lambda p, g: p - 0.1 * g, model.parameters(), gradient)), value

    losses = []
    for _ in range(10):
        model, value = step(model)
        losses.append(float(value))
    print(f"loss {losses[0]:.4f} → {losses[-1]:.4f}, {int(model.layers[0].calls)} calls of one layer at two places")
    assert losses == sorted(losses, reverse=True)
    assert model.layers[0] is model.layers[1]
    assert int(model.layers[0].calls) == 20


if __name__ == "__main__":
    main()
