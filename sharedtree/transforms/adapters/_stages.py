"""Ahead-of-time compilation: JAX's stages (`Traced`, `Lowered`, `Compiled`) with identities preserved."""

from collections.abc import Callable
from typing import Any

from ..._jax_internals import api_boundary
from ..._under_way import make_room, room_made


class Stage:
    """A stage of ahead-of-time compilation (`Traced`, `Lowered`, `Compiled`) of a function with identities preserved.

    Has every attribute of JAX's own stage. `.lower()` and `.compile()` lead to the next one. The last one is called
    with the arguments of the function but the static ones, as JAX's.
    """

    def __init__(self, stage: Any, call: Callable[..., Any]) -> None:
        self._stage = stage
        self._call = call
        self._depth = room_made()

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> "Stage":
        """The next stage, lowered."""
        make_room(self._depth)
        return Stage(self._stage.lower(*args, **kwargs), self._call)

    @api_boundary
    def compile(self, *args: Any, **kwargs: Any) -> "Stage":
        """The next stage, compiled."""
        make_room(self._depth)
        return Stage(self._stage.compile(*args, **kwargs), self._call)

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._stage, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def __repr__(self) -> str:
        return f"Stage({self._stage!r})"
