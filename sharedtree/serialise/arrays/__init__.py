"""Arrays: how each is described in a manifest, how it becomes bytes, and how bytes become it again, where it is wanted.

In come JAX's and NumPy's arrays, or the tensors of a container; out come their bytes piece by piece, or arrays of the
right dtype, kind and sharding. It never gathers an array that is sharded, never lets JAX shorten a number in silence,
and takes no dtype from the text of a file but by a table.
"""
