"""Packing and unpacking: a DAG into its unique traced leaves and its structure, and back, in C or in Python.

Comes in: objects, and the rows of `libraries/`, which describe their classes. Goes out: leaves, structures, sharing and
errors. This room never asks for a particular library, nor what a transform, an optimizer or a file does with its
results.
"""

__version__ = "0.2.0"  # of the package; also written into files
