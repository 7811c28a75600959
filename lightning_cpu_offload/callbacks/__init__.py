"""Callbacks that say what the offload does: numbers in the logger, a timeline of a step, and a table at the end."""

from lightning_cpu_offload.callbacks.items import count_items
from lightning_cpu_offload.callbacks.monitor import OffloadMonitor
from lightning_cpu_offload.callbacks.recording import Span
from lightning_cpu_offload.callbacks.timeline import draw_step, draw_timeline, write_trace

__all__ = ["OffloadMonitor", "Span", "count_items", "draw_step", "draw_timeline", "write_trace"]
