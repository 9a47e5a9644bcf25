"""A context of its own for each thread, in place of the one that treeo and treex keep for the whole process.

How a tree is flattened, which layer is being built, and which key comes next are in three global variables, which a
`with` statement replaces and puts back. While one thread filters a model, every other thread's `jax.jit` would flatten
the same model into `FieldInfo`s. Their classes derive from `threading.local`, so this is what was meant.
"""

import threading
from typing import Any

NAMES = {
    "treeo.tree": ("_CONTEXT", "_COMPACT_CONTEXT"),
    "treex.module": ("_INIT_CONTEXT",),
    "treex.contexts": ("_CONTEXT",),
}
"""Module → its global variables, each of which holds an instance of a class of contexts."""


class PerThread:
    """Stands in a global variable for the innermost context of the thread that asks.

    Args:
        cls: the class of the contexts. From now on, entering one of them makes it the innermost of its thread, and
            leaves the global variable alone.
    """

    def __init__(self, cls: Any) -> None:
        own = threading.local()

        def entered() -> list[Any]:
            if not hasattr(own, "entered"):
                own.entered = [cls()]
            return own.entered

        def leave(context: Any, *_: object) -> None:
            contexts = entered()
            for place in reversed(range(len(contexts))):
                if contexts[place] is context:
                    del contexts[place]
                    return
            # A generator that another thread left open, and that ends in this one, has entered nothing here.

        cls.__enter__ = lambda context: entered().append(context)
        cls.__exit__ = leave
        object.__setattr__(self, "_innermost", lambda: entered()[-1])

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_innermost")(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_innermost")(), name, value)


def separate(module: Any) -> None:
    """Gives each thread contexts of its own in a module of `NAMES`."""
    for name in NAMES[module.__name__]:
        setattr(module, name, PerThread(type(getattr(module, name))))
