"""Makes the real treex and treeo run on today's JAX. Both stopped working many JAX releases ago.

Their installed files are run unmodified. Each module is available as `sharedtree.compat.treex` (or `treeo`) and under
its own name. Names that the two libraries use and that JAX, NumPy and Flax have dropped are visible again, but only to
these two. Nothing is imported before a program asks for it.
"""
