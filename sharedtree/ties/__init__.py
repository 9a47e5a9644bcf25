"""Ties: what is one object at several paths, listed, made and undone by hand, meant or lost; `Policy` and `Context`.

In come trees; out go ties, and trees with other ties. Never calls a transform, and never changes a tree in place.
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
