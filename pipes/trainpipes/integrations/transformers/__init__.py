"""Pipelines in the Trainer of Hugging Face's transformers.

checkpoint_file     the position in the data, in a checkpoint's folder
training_run        where one ``train()`` stands in its data
evaluation          every row of an evaluation once, on any number of ranks
mixin               the Trainer's hooks
"""

from trainpipes.errors import MissingExtraError
from trainpipes.extra import need

need("transformers", "trainpipes.integrations.transformers")
need("accelerate", "trainpipes.integrations.transformers")

import transformers  # noqa: E402

from trainpipes.integrations.transformers.mixin import HOOKS, PipelineTrainerMixin  # noqa: E402

__all__ = ["PipelineTrainerMixin", "Trainer"]

for _hook in HOOKS:
    if not hasattr(transformers.Trainer, _hook):
        raise MissingExtraError(
            "trainpipes.integrations.transformers needs a Trainer of transformers 5.3 or later, got "
            f"{transformers.__version__}, which has no Trainer.{_hook}: "
            "pip install 'transformers>=5.3,<6' accelerate"
        )


class Trainer(PipelineTrainerMixin, transformers.Trainer):
    """A ``transformers.Trainer`` that takes pipelines which make batches. See ``PipelineTrainerMixin``."""
