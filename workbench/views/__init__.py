"""Pictures and tables: functions of a graph, a trace or a record, never of an engine.

Everything here returns something a cell can show, with text beside the picture, and the same bytes every time.
"""

from workbench.views.cards import Card
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.graphs import graph_picture
from workbench.views.memory import MemoryMap, address_steps, arena_steps, byte_map, memory_picture
from workbench.views.palette import OKABE_ITO, QUANTITY, Style, style
from workbench.views.rasters import heat_picture, raster_picture, route_steps
from workbench.views.tables import Stack, Table, side_by_side, table

__all__ = ["Card", "MemoryMap", "OKABE_ITO", "Picture", "QUANTITY", "Stack", "Style", "Table", "address_steps", "arena_steps",
           "byte_map", "graph_picture", "heat_picture", "memory_picture", "new_figure", "picture", "raster_picture",
           "route_steps", "side_by_side", "style", "table"]
