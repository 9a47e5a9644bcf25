"""Models as people look at them: a table, a picture, and marks in treescope's views.

In comes a live model, or the header of a file; out come text, HTML and SVG, in which every tie is marked and counted
once. All of them are made from one plain description, which holds texts and numbers. This room never reads an array,
calls a model's own code but to take it apart, or looks up a class that a file names; and it imports rich, igraph,
drawsvg and treescope when they are used, not before.
"""

from ._drawing import Drawing as Drawing, draw as draw
from ._in_treescope import register as register
from ._summary import Summary as Summary, summary as summary

for _type in (Drawing, Summary):
    _type.__module__ = __name__  # under which they are printed and documented
