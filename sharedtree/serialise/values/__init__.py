"""Objects and nodes. Keeps the promises that nothing is called by the file's word, and that work is linear.

A DAG is taken apart into the nodes of a manifest, and a manifest is built into a DAG. `_manifest.py` checks the
grammar, `_all_kinds_of_nodes.py` bounds the nesting and what is hashed, `_nodes.py` counts colliding keys, and
`_kinds_of_values.py` calls the unflatten functions of registered classes.

In come trees, or manifests that were parsed; out come manifests with the arrays apart, or trees in which what was one
object is one object. It never reads or writes a byte of an array, never recurses, and never calls what a file describes
but the registered functions of classes that are trusted.
"""
