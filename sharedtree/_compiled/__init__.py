"""Pack and unpack without walking: straight-line code, generated once for each structure.

The walk of `_graph` asks of each object what it is. For a structure that was seen before the answers are known, so they
only have to be checked: this is still a `Linear` with these fields, that list still has three entries, these two paths
still lead to one object, and no other two do. The generated *reader* checks exactly that while it reads every field,
and gives up if anything is different; then the walk decides. It never assumes that an object which it saw before is
unchanged. The generated *builder* makes the objects with `object.__new__` and one dictionary each.

Equal closed parts of a structure share one function (see `_parts`), so forty equal layers are read by one.

attrs, dataclasses and Equinox generate code for single classes in this way; here it is for a whole object graph.
"""

from ._building import Builders as Builders, put_together as put_together
from ._distinct_objects import ALONE as ALONE, ONCE as ONCE, all_different as all_different
from ._faults import optimising as optimising
from ._parts import parts_of as parts_of
from ._reading import Readers as Readers, Reading as Reading
from ._source import MAX_DEPTH as MAX_DEPTH, Source as Source, indented as indented
