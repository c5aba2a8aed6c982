"""States of ours in checkpoints of any layout: found, read, told, and tried on a pipeline.

inert     what a pickle says, without importing or calling anything that it names
file      one file: torch.save, JSON
dcp       folders of torch.distributed.checkpoint
within    where in dicts and lists states of ours are
places    ``read_states``: files and folders
told      ``Told``: what a state says, in a few facts
fit       ``fits``: whether a pipeline takes a state
"""

from trainpipes.checkpoint.fit import Fit, fits
from trainpipes.checkpoint.places import read_states
from trainpipes.checkpoint.told import Told, tell
from trainpipes.checkpoint.within import FoundState

__all__ = ["Fit", "FoundState", "Told", "fits", "read_states", "tell"]
