"""Libraries that stopped working years of JAX releases ago, on today's JAX: the real treex and treeo.

In come their files, unmodified; out go their modules, under `sharedtree.compat` and their own names. What they use and
JAX, NumPy and Flax no longer have is given back to them alone. Never imports either until it is asked for.
"""
