"""`jax.checkpoint`: static arguments are not packed."""

from collections.abc import Collection, Sequence
from typing import Any

from .._argnums import several
from .._crossed import Position
from .._function import FunctionTransform


class CheckpointTransform(FunctionTransform):
    """A function under `jax.checkpoint`, with identities preserved."""

    caches_traces = True
    only_for_transform = frozenset({"policy", "prevent_cse", "concrete"})

    def static_positions(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Collection[Position]:
        """Those that `static_argnums` chooses."""
        static = several(self.options.get("static_argnums", ()))
        return {i + len(args) if i < 0 else i for i in static}
