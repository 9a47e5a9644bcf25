"""`jax.jit` and `equinox.filter_jit`: static and donated arguments, shardings, ahead-of-time compilation."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

import equinox as eqx
import inspect
import jax

from .._arguments import Arguments, Position, positions_of
from .._context import Policy, PolicyOption, current_policy
from .._copies import Incomparable
from .._distinct import another
from .._graph import Tags, pack
from .._jax_internals import api_boundary, current_traces, used_inputs
from .._node_types import is_module, node_type_of
from .._prefix import Branch
from .._statics import Static
from .._stateful import makes_state
from .._structure import Node, canonical
from .._text import shown
from .._walked import Walked
from ._argnums import Chosen
from ._call import Call, Dealing
from ._function_transform import FunctionTransform
from ._inconsistent import error_of, occurrences
from ._inside import Received
from ._labels import Fates, Treatment
from ._meet import Words, require_same
from ._pass_through import is_tracer
from .checks._static_arguments import require_separate

DONATED, KEPT = "donated", "not donated"

_ELSEWHERE = ("in_shardings", "out_shardings", "device", "backend")  # options under which jit moves what it returns
