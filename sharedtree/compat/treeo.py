"""The real `treeo` 0.0.10 on today's JAX, and the module that `import treeo` finds from now on."""

import sys
from typing import Any

from ._import_hook import load

_real = load("treeo")


def __getattr__(name: str) -> Any:
    # A thread may get this module although another thread replaces it by the real one at the same moment.
    return getattr(_real, name)


# The import statement returns the entry of `sys.modules`, so its caller gets the real module.
sys.modules[__name__] = _real
