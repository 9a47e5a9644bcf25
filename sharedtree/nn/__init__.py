"""Layers: `Module`, whose attributes can be assigned, and Equinox's stateful and shared layers as models with ties.

The functions take classes and models, and return models. They never run or train a layer.
"""

from ._mutable_module import Module as Module, parameter as parameter, state_field as state_field
from ._shared_layers import unwrap_shared as unwrap_shared
from ._stateful_layers import inference_mode as inference_mode, make_with_state as make_with_state
