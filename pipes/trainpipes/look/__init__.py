"""How you look at a pipeline, its rows, its files and its states."""

from trainpipes.look.checkpoint import read_states, summarize
from trainpipes.look.inspect import Inspection, inspect_files

__all__ = ["Inspection", "inspect_files", "read_states", "summarize"]
