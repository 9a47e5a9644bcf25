"""Shows models to people: as a table, as a picture, and with marks where treescope shows them.

A live model or the header of a file becomes a plain description: texts and numbers, with every tie marked and counted
once. Text, HTML and SVG are made from that description.

Nothing in this folder reads an array or looks up a class that a file names. The only code of a model that runs is its
flatten functions. rich, igraph, drawsvg and treescope are imported when they are used.
"""

from ._drawing import Drawing as Drawing, draw as draw
from ._in_treescope import register as register
from ._summary import Summary as Summary, summary as summary

for _type in (Drawing, Summary):
    # The public name of the module, which is printed and documented.
    _type.__module__ = __name__
