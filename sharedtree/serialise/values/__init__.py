"""Objects and nodes: a DAG taken apart into the nodes of a manifest, and a manifest built into a DAG.

In come trees, or manifests that were parsed; out come manifests with the arrays apart, or trees in which what was one
object is one object. It never reads or writes a byte of an array, never recurses, and never calls what a file describes
but the registered functions of classes that are trusted.
"""
