"""Models as plain nested data, for people who bring their own storage: `state` and `load_state`.

In comes a model, or a model and nested data; out go nested data, or a model. Never writes a file.
"""

from ._model_from_state import load_state as load_state
from ._state_forms import register_state as register_state
from ._state_misfits import StateReport as StateReport
from ._state_of_model import state as state

StateReport.__module__ = __name__.partition(".")[0]  # under which it is printed, pickled and documented
