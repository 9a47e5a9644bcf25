"""Models as people look at them: a table, a picture, and marks in treescope's views.

In come a live model, or the header of a file; out go text, HTML and SVG, made from one plain description of texts and
numbers, in which every tie is marked and counted once. Never reads an array, calls a model's own code but to take it
apart, or looks up a class that a file names; rich, igraph, drawsvg and treescope are imported when they are used.
"""

from ._drawing import Drawing as Drawing, draw as draw
from ._in_treescope import register as register
from ._summary import Summary as Summary, summary as summary

for _type in (Drawing, Summary):
    _type.__module__ = __name__  # under which they are printed and documented
