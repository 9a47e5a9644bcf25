"""The real `treeo` 0.0.10 on today's JAX; the very module that `import treeo` finds from now on."""

import sys
from typing import Any

from ._import_hook import load

_real = load("treeo")


def __getattr__(name: str) -> Any:
    # Python may hand this module to a thread that imports it at the moment in which another thread replaces it.
    return getattr(_real, name)


sys.modules[__name__] = _real
