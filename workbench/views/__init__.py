"""Pictures and tables: functions of a graph, a trace or a record, never of an engine.

Everything here returns something a cell can show, with text beside the picture, and the same bytes every time.
"""

from workbench.views.cards import Card
from workbench.views.expert_cache import cache_steps, hit_rate_picture, residency_picture
from workbench.views.expert_time import (
    hindcast_table,
    ledger_picture,
    ledger_table,
    parts_picture,
    regime_picture,
    token_way,
)
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.gradient_steps import backward_steps
from workbench.views.graph_data import graph_data
from workbench.views.graph_drawing import layered_picture
from workbench.views.graphs import graph_picture
from workbench.views.hazards import Hazard, hazards
from workbench.views.lines import curves_picture, lane_picture, line_picture
from workbench.views.memory import MemoryMap, address_steps, arena_steps, byte_map, memory_picture
from workbench.views.palette import OKABE_ITO, QUANTITY, Style, style
from workbench.views.perfetto import to_perfetto
from workbench.views.prediction import forecast_steps, group_picture, layer_picture, online_picture, recall_picture
from workbench.views.rasters import heat_picture, raster_picture, route_steps
from workbench.views.routing import (
    group_steps,
    load_picture,
    load_table,
    queue_steps,
    router_picture,
    sum_steps,
    token_picture,
    training_steps,
)
from workbench.views.run_drawing import expert_picture, missing_wait, waits_table
from workbench.views.run_steps import run_steps
from workbench.views.runs import memory_map, memory_table, split_table, traffic, traffic_table
from workbench.views.schedule_drawing import schedule_picture
from workbench.views.schedule_steps import schedule_steps
from workbench.views.step_drawing import steps_picture
from workbench.views.steps import expand_steps, memory_steps, plan_steps, record_steps
from workbench.views.tables import Stack, Table, side_by_side, table
from workbench.views.timelines import timeline, timeline_table
from workbench.views.whatif import compare_table, optimum_table, outcome_table, placement_table, why_not_view

__all__ = ["Card", "Hazard", "MemoryMap", "OKABE_ITO", "Picture", "QUANTITY", "Stack", "Style", "Table",
           "address_steps", "arena_steps", "backward_steps", "byte_map", "cache_steps", "compare_table",
           "curves_picture", "expand_steps", "expert_picture", "forecast_steps", "graph_data", "graph_picture",
           "group_picture", "group_steps", "hazards", "heat_picture", "hindcast_table", "hit_rate_picture",
           "lane_picture", "layer_picture", "layered_picture", "ledger_picture", "ledger_table",
           "line_picture", "load_picture", "load_table", "memory_map", "memory_picture", "memory_steps",
           "memory_table", "missing_wait", "new_figure", "online_picture", "optimum_table", "outcome_table",
           "parts_picture", "picture", "placement_table", "plan_steps", "queue_steps", "raster_picture",
           "recall_picture", "record_steps", "regime_picture", "residency_picture", "route_steps",
           "router_picture", "run_steps", "schedule_picture", "schedule_steps", "side_by_side", "split_table",
           "steps_picture", "style", "sum_steps", "table", "timeline", "timeline_table", "to_perfetto",
           "token_picture", "token_way", "traffic", "traffic_table", "training_steps", "waits_table",
           "why_not_view"]  # fmt: skip
