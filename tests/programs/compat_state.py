"""What importing treex may change: programs that follow this ask for it before and after."""


def state():
    import builtins
    import sys

    import jax
    import numpy

    flax = sys.modules.get("flax")
    return {
        "jax": [name for name in ("tree_map", "tree_multimap", "tree_leaves", "tree_flatten") if hasattr(jax, name)],
        "jax.tree_util": sorted(vars(jax.tree_util)),
        "numpy": hasattr(numpy.lib, "arraysetops"),
        "core": sorted(name for name in vars(jax.core) if not name.startswith("__")),
        "lax_numpy": hasattr(sys.modules["jax._src.numpy.lax_numpy"], "ndarray"),
        "zeros": flax is not None and hasattr(flax.linen.linear, "zeros"),
        "flax": flax is not None and sorted((k, repr(v)) for k, v in flax.config._values.items() if k != "_values"),
        "import": builtins.__import__.__module__,
        "finders": [type(finder).__module__ for finder in sys.meta_path],
        "modules": sorted(name for name in sys.modules if name.partition(".")[0] in ("treex", "treeo")),
    }
