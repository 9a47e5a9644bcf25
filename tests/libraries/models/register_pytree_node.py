import jax

from ._layers import bias as bias, loss as loss, places as places


class Net:
    def __init__(self, first, second, bias):
        self.first, self.second, self.bias = first, second, bias


jax.tree_util.register_pytree_node(
    Net, lambda m: ((m.first, m.second, m.bias), None), lambda _, children: Net(*children)
)

TRUSTED = [Net]
make = lambda w, b: Net(w, w, b)


def change(model, b):
    model.bias = b
