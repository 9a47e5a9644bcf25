"""Models as plain nested data, for people who bring their own storage: `state` and `load_state`.

A model comes in and nested dictionaries go out, or both come in and a model goes out. Never writes a file.
"""

from ._loading_state import load_state as load_state
from ._state_forms import register_state as register_state
from ._state_misfits import StateReport as StateReport
from ._taking_state import state as state
