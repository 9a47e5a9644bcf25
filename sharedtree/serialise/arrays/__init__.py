"""Arrays. Keeps the promise that no text of a file is evaluated as a dtype: `_dtypes.py` looks dtypes up in a table.

This folder turns JAX's and NumPy's arrays into bytes, piece by piece, and bytes into arrays of the right dtype, kind
and sharding. It has the entries of arrays in a manifest. It never gathers an array that is sharded and never lets JAX
shorten a number in silence.

    _dtypes.py          names of dtypes; array → bytes, bytes → array
    _placing.py         entries of arrays; which are read, and where they go
    _orbax_forms.py     arrays in Orbax checkpoints
"""
