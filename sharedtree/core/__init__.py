"""Packing and unpacking: a DAG into its unique traced leaves and its structure, and back, in C or in Python.

Objects come in, with what `libraries/` says of their classes; leaves, structures and sharing go out, and so do errors.
Nothing here knows a library by name, or what a transform, an optimizer or a file does with what it gets.
"""

__version__ = "0.2.0"  # of the package; also written into files
