"""Ties: functions that list, make, undo and compare them, and warn of lost ones; also `Policy` and `Context`.

The functions take trees, and return ties or trees with other ties. They never call a transform, and never change a tree
in place.
"""

from ._list_ties import (
    Tie as Tie,
    assert_same_sharing as assert_same_sharing,
    count_parameters as count_parameters,
    same_sharing as same_sharing,
    ties as ties,
)
from ._policy_and_context import Context as Context, Policy as Policy
from ._tie_and_untie import copy as copy, retie as retie, tie as tie, untie as untie
