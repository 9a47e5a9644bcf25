"""Layers: the mutable `Module`, and functions that turn Equinox's stateful and shared layers into models with ties.

Nothing in this folder runs or trains a layer.
"""

from ._mutable_module import Module as Module, parameter as parameter, state_field as state_field
from ._shared_layers import unwrap_shared as unwrap_shared
from ._stateful_layers import inference_mode as inference_mode, make_with_state as make_with_state
