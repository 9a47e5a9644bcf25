"""A static argument that shares an object with a traced one: inside the function they would be two objects."""

from typing import Any

from jax import tree_util as jtu

from ..._arguments import Arguments
from ..._errors import InconsistentSharingError
from ..._graph import Tags, walk
from ..._node_types import node_type_of
from ..._structure import edges
from ..._walked import Walked
from .._argument_names import Names


def require_separate(arguments: Arguments, call: Walked, names: Names) -> None:
    """Raises if a static argument holds an object that is also in one that is traced.

    Args:
        arguments: all of them.
        call: those that are traced, with the caller's objects.
        names: of the arguments.
    """
    static = [names.text(i) for i, name in enumerate(arguments.names) if name is None]
    for text, value in zip([*static, *arguments.static], arguments.statics, strict=True):
        if node_type_of(value) is not None:
            _require(value, text, call)


def _require(value: Any, text: str, call: Walked) -> None:
    own = Tags()
    _, records, root = walk(value, own)
    known = set(map(id, call.objects))  # alive in the call
    for number, path in edges(records, [((), root)]):
        obj = own.objects[number]
        if id(obj) in known and own.number_of(obj) is not None:  # as above
            where = text + jtu.keystr(path)
            raise InconsistentSharingError(
                f"`{where}` is static, but the same `{type(obj).__name__}` is also in an argument that is traced.\n"
                "Inside the function they would be two objects. Pass only one of them, or a copy as the static one:\n"
                "    f(model, copy.deepcopy(config))",
                (where,),
                ("static",),
            )
