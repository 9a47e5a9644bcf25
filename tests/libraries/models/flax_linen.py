import flax.linen as nn
import jax.numpy as jnp

import sharedtree as st


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        bias = self.param("bias", nn.initializers.zeros_init(), (3,))
        hidden = jnp.tanh(nn.Dense(3, use_bias=False, name="first")(x))
        return nn.Dense(3, use_bias=False, name="second")(hidden) + bias


TRUSTED = []
POLICY = st.Policy(containers=True)


def make(w, b):
    return {"params": {"first": {"kernel": w}, "second": {"kernel": w}, "bias": b}}


def loss(variables, x):
    return (Net().apply(variables, x) ** 2).sum()


def places(variables):
    return variables["params"]["first"]["kernel"], variables["params"]["second"]["kernel"]


def bias(variables):
    return variables["params"]["bias"]


def change(variables, b):
    variables["params"]["bias"] = b
