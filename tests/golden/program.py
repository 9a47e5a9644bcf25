"""A program that saves what it defines itself. It is run as a script, and others import it under its own name."""

import sys
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import sharedtree as st


class Net(NamedTuple):
    w: Any
    tied: Any
    activation: Any


def double(x):
    return 2 * x


def make() -> Any:
    """What the golden file holds."""
    w = jnp.asarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    return {"net": Net(w, w, double), "step": 7}


if __name__ == "__main__":
    st.save(sys.argv[1], make(), metadata={"family": "program"})
