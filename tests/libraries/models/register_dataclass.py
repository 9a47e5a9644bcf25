import dataclasses
from typing import Any

import jax

from ._layers import bias as bias, loss as loss, places as places


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    first: Any
    second: Any
    bias: Any


TRUSTED = [Net]
make = lambda w, b: Net(w, w, b)


def change(model, b):
    model.bias = b
