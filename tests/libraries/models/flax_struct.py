from typing import Any

import flax.struct

from ._layers import bias as bias, loss as loss, places as places


@flax.struct.dataclass
class Net:
    first: Any
    second: Any
    bias: Any


TRUSTED = [Net]
make = lambda w, b: Net(w, w, b)
