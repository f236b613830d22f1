"""Pictures and tables: functions of a graph, a trace or a record, never of an engine.

Everything here returns something a cell can show, with text beside the picture, and the same bytes every time.
"""

from workbench.views.cards import Card
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.graphs import graph_picture
from workbench.views.palette import OKABE_ITO, QUANTITY, Style, style
from workbench.views.rasters import heat_picture, raster_picture, route_steps
from workbench.views.tables import Table, side_by_side, table

__all__ = ["Card", "OKABE_ITO", "Picture", "QUANTITY", "Style", "Table", "graph_picture", "heat_picture", "new_figure", "picture",
           "raster_picture", "route_steps", "side_by_side", "style", "table"]
