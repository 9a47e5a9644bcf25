"""Call sites: the plans of one wrapped function, made once a structure is seen again.

Threads share a site without waiting for one another: what it knows is in tuples, each replaced by another in a single
assignment.
"""

from collections.abc import Collection
from typing import Any

from jax.tree_util import tree_structure

from .._compiled import optimising
from ._crossing import Call, Position
from ._plans import MOST_PLANS, CallPlan, Claims, can_be_planned


class Site:
    """The plans of one wrapped function under one policy.

    A structure gets a plan when it is seen for the second time, so that what is called once is not compiled twice. Only
    so many are kept: plans keep their structures alive, also those that JAX's caches have let go of.
    """

    def __init__(self) -> None:
        self.plans: tuple[CallPlan, ...] = ()
        self._seen: tuple[Any, ...] = ()
        self._planned = Claims()

    def prefer(self, plan: CallPlan) -> None:
        """Puts a plan before the others."""
        with self._planned.lock:
            if plan in self.plans:
                self.plans = (plan, *[each for each in self.plans if each is not plan])

    def saw(self, call: Call, static: Collection[Position]) -> None:
        """A call was packed by walking."""
        with optimising():
            key = _key(call, static)
            if key in self._planned:
                return  # its plan gave up, and would again
            if key not in self._seen:
                self._seen = (*self._seen, key)[-MOST_PLANS:]
            elif can_be_planned(call, static) and self._planned.claim(key):
                plan = CallPlan(call, static)
                with self._planned.lock:
                    self.plans = (plan, *self.plans)[:MOST_PLANS]

    def learn(self, plan: CallPlan, result: Any) -> None:
        """A call that a plan had packed returned something that it does not know."""
        with optimising():
            plan.learn(result)


def _key(call: Call, static: Collection[Position]) -> Any:
    dynamic = [value for position, value in call.items() if position not in static]
    return len(call.args), tuple(sorted(call.kwargs)), tree_structure(dynamic)
