from typing import Any

import jax_dataclasses as jdc

from ._layers import bias as bias, loss as loss, places as places


@jdc.pytree_dataclass
class Net:
    first: Any
    second: Any
    bias: Any


TRUSTED = [Net]
make = lambda w, b: Net(w, w, b)
