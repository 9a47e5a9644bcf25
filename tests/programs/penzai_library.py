"""Trains, saves and loads modules of Penzai, as the page on new libraries has them."""

import json

import jax.numpy as jnp
from penzai import pz

import sharedtree as st


class Net(st.Module):
    def __init__(self, layer, mean):
        self.first, self.second, self.mean = layer, layer, mean


weight = pz.ParameterValue(label="w", value=jnp.ones((2, 3)))
net = Net(pz.nn.Linear(weight, ("i",), ("o",)), pz.StateVariableValue(label="m", value=jnp.zeros(3)))
trained = net.parameters()
state = st.state(net)
state["first"]["in_axis_names"] = state["second"]["in_axis_names"] = ("j",)
state["mean"]["label"] = "mean"
loaded, _ = st.load_state(net, state, strict=False)
again = st.from_bytes(st.to_bytes(net), trusted=[Net, "penzai"])
print(
    json.dumps(
        {
            "trained": [each is not None for each in (trained.first.weights.value, trained.mean.value)],
            "merged": net.merge(trained).mean.value is net.mean.value,
            "loaded": [loaded.first.in_axis_names, loaded.mean.label, loaded.first is loaded.second],
            "saved": [again.first.in_axis_names, again.mean.label, again.first is again.second],
        }
    )
)
