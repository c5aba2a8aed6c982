"""What the training scripts share, so that each of them shows its own training job alone.

model.py            a small transformer to try things on, causal or bidirectional; a classifier
encoder_decoder.py  the same for prompt in, response out
losses.py           of tokens, of next tokens, of classes
options.py          the command line that all scripts have
ranks.py            one process, or those of torchrun
epochs.py           batches epoch after epoch, on the device
checkpoints.py      everything that a resumed run needs, in one file
log.py              a line for each step: number, hash of the batch, loss
progress.py         one line that tells how far a job is
"""

from trainpipes_recipes.training.checkpoints import Checkpoints
from trainpipes_recipes.training.encoder_decoder import EncoderDecoder
from trainpipes_recipes.training.epochs import batches
from trainpipes_recipes.training.log import Log
from trainpipes_recipes.training.losses import class_loss, next_token_loss, token_loss
from trainpipes_recipes.training.model import Classifier, Transformer
from trainpipes_recipes.training.options import options, text_options, vocabulary_size
from trainpipes_recipes.training.ranks import Rank, this_rank

__all__ = [
    "Checkpoints", "Classifier", "EncoderDecoder", "Log", "Rank", "Transformer", "batches",
    "class_loss", "next_token_loss", "options", "text_options", "this_rank", "token_loss",
    "vocabulary_size",
]  # fmt: skip
