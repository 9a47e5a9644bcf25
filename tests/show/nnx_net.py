"""A model of Flax NNX with a tie, equal layers, statistics and a random stream."""

from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(4)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.head = nnx.Linear(2, 2, rngs=rngs)
        self.head.kernel = self.layers[0].kernel
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def net():
    return Net(nnx.Rngs(0))
