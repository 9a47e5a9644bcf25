"""Packing and unpacking: a DAG into its unique traced leaves and its structure, and back, in C or in Python.

In come objects, and what `libraries/` says of their classes; out go leaves, structures, sharing, and errors. Never asks
which library it is, nor what a transform, an optimizer or a file does with what it gets.
"""

__version__ = "0.2.0"  # of the package; also written into files
