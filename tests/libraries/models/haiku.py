import haiku as hk
import jax.numpy as jnp

import sharedtree as st


def net(x):
    hidden = jnp.tanh(hk.Linear(3, with_bias=False, name="first")(x))
    return hk.Linear(3, name="second")(hidden)


TRUSTED = []
POLICY = st.Policy(containers=True)


def make(w, b):
    return {"first": {"w": w}, "second": {"w": w, "b": b}}


def loss(params, x):
    return (hk.without_apply_rng(hk.transform(net)).apply(params, x) ** 2).sum()


def places(params):
    return params["first"]["w"], params["second"]["w"]


def bias(params):
    return params["second"]["b"]


def change(params, b):
    params["second"]["b"] = b
