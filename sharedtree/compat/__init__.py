"""Libraries that stopped working years of JAX releases ago, on today's JAX.

`treex` is where `preserve_identities` was first proposed. `from sharedtree.compat import treex as tx` is the real
package, its files unmodified, and so is `from sharedtree.compat import treeo as to`, which it is built on. What they
use and JAX, NumPy and Flax no longer have is given back to them alone:

- `_dropped_names`: which names these are, since when they are gone, and what stands in for each;
- `_library_views`: what the libraries look like to them, and the import statement that returns it;
- `_linen`: Flax's layers with variables in frozen dicts, and `_tree_map`: `jax.tree_map`, which keeps sharing;
- `_metadata`: how what treeo keeps about its fields is compared, and `_thread_contexts`: a context for each thread;
- `_importing`: how the two packages are found, checked and run.

Nothing is imported until one of the two is asked for.
"""
