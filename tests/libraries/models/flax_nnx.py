from flax import nnx

from ._layers import loss_of_layers


class Net(nnx.Module):
    def __init__(self, first, second, bias):
        self.first, self.second, self.bias = first, second, bias


TRUSTED = [Net, "flax"]
loss = loss_of_layers


def make(w, b):
    first, second = (nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(2))
    first.kernel = second.kernel = nnx.Param(w)
    return Net(first, second, nnx.Param(b))


def places(model):
    return model.first.kernel, model.second.kernel


def bias(model):
    return model.bias[...]


def change(model, b):
    model.bias[...] = b
