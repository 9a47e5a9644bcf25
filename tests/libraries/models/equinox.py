import equinox as eqx
import jax

from ._layers import bias as bias, loss_of_layers


class Net(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    bias: jax.Array


TRUSTED = [Net]
loss = loss_of_layers


def make(w, b):
    linear = eqx.nn.Linear(3, 3, use_bias=False, key=jax.random.key(0))
    first, second = (eqx.tree_at(lambda linear: linear.weight, linear, w) for _ in range(2))
    return Net(first, second, b)


def places(model):
    return model.first.weight, model.second.weight
