"""Arrays: their entries in a manifest, and their bytes in a file.

This folder turns JAX's and NumPy's arrays into bytes, piece by piece, and bytes into arrays of the right dtype, kind
and sharding. It never gathers an array that is sharded and never lets JAX shorten a number in silence. It looks dtypes
up in a table, and evaluates no text of a file.

    _dtypes.py          names of dtypes; array → bytes, bytes → array
    _placing.py         entries of arrays; which are read, and where they go
    _orbax_forms.py     arrays in Orbax checkpoints
"""
