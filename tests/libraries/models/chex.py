from typing import Any

import chex

from ._layers import bias as bias, loss as loss, places as places


@chex.dataclass
class Net:
    first: Any
    second: Any
    bias: Any


TRUSTED = [Net]
make = lambda w, b: Net(first=w, second=w, bias=b)


def change(model, b):
    model.bias = b
