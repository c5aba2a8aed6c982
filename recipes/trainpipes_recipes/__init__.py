"""Prebuilt pipelines, each a readable file of public stages to copy and change."""

from trainpipes_recipes.chat import chat
from trainpipes_recipes.classification import classification
from trainpipes_recipes.images import images
from trainpipes_recipes.masked_lm import masked_lm
from trainpipes_recipes.preference import preference
from trainpipes_recipes.pretrain import pretrain
from trainpipes_recipes.prompts import prompts
from trainpipes_recipes.seq2seq import seq2seq
from trainpipes_recipes.sft import sft
from trainpipes_recipes.speech import speech
from trainpipes_recipes.tabular import tabular
from trainpipes_recipes.tokens import tokens
from trainpipes_recipes.video_classification import video_classification
from trainpipes_recipes.vision_chat import vision_chat

__all__ = [
    "chat", "classification", "images", "masked_lm", "preference", "pretrain", "prompts",
    "seq2seq", "sft", "speech", "tabular", "tokens", "video_classification", "vision_chat",
]  # fmt: skip
