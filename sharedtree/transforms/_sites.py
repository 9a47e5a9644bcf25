"""Call sites: the plans of one wrapped function, made once a structure is seen again."""

import collections
import threading
from collections.abc import Collection
from typing import Any

from jax.tree_util import tree_structure

from .._context import Policy
from ._crossing import Call, Position
from ._plans import MOST_PLANS, CallPlan, can_be_planned

_ENOUGH = 8 * MOST_PLANS
"""A site with so many structures would make plans for ever, each driving out one that is needed next."""


class Site:
    """The plans of one wrapped function under one policy.

    A structure gets a plan when it is seen for the second time, so that what is called once is not compiled twice. Only
    so many are kept: plans keep their structures alive, also those that JAX's caches have let go of.
    """

    def __init__(self, policy: Policy, jitted: Any) -> None:
        self.policy = policy
        self.jitted = jitted  # what a plan's arguments are for
        self.plans: tuple[CallPlan, ...] = ()
        self._seen: collections.deque[Any] = collections.deque(maxlen=MOST_PLANS)
        self._planned: collections.deque[Any] = collections.deque(maxlen=MOST_PLANS)
        self._num_made = 0
        self._lock = threading.RLock()  # a user's `==`, or a finalizer, may call the function again

    def prefer(self, plan: CallPlan) -> None:
        """Puts a plan before the others."""
        with self._lock:
            if plan in self.plans:
                self.plans = (plan, *[each for each in self.plans if each is not plan])

    def saw(self, call: Call, static: Collection[Position]) -> None:
        """A call was packed by walking."""
        key = _key(call, static)
        with self._lock:
            if key in self._planned:
                return  # its plan gave up, and would again
            if key not in self._seen:
                self._seen.append(key)
            elif self._num_made < _ENOUGH and can_be_planned(call, static):
                self._num_made += 1
                self._planned.append(key)
                self.plans = (CallPlan(call, static), *self.plans)[:MOST_PLANS]


def _key(call: Call, static: Collection[Position]) -> Any:
    dynamic = [value for position, value in call.items() if position not in static]
    return len(call.args), tuple(sorted(call.kwargs)), tree_structure(dynamic)
