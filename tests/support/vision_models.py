"""What ``visions`` makes on the spot of classes of transformers: nothing is downloaded."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
    LlavaProcessor,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.processing_utils import ProcessorMixin

__all__ = ["model_of", "processor_of"]

#: Turns as ChatML writes them, with marks around what the assistant says.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endgeneration %}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: The same without the marks.
PLAIN = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL = {
    "llava": ["<image>"],
    "llava_next": ["<image>"],
    "idefics3": [
        "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
        *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
    ],
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
}  # fmt: skip


class WithoutVideos(ProcessorMixin):
    """Without the part for videos, which needs torchvision."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: Any = None,
        **kwargs: Any,
    ) -> None:
        for kind in ("image", "video"):
            token = f"<|{kind}_pad|>"
            setattr(self, f"{kind}_token", token)
            setattr(self, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(token))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class Qwen2VLImages(WithoutVideos, Qwen2VLProcessor):
    pass


class Qwen2_5_VLImages(WithoutVideos, Qwen2_5_VLProcessor):
    pass


def tokenizer_of(family: str) -> Any:
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: number for number, letter in enumerate(sorted(letters))}
    own = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>")
    special = ["<|im_start|>", "<|im_end|>", *SPECIAL.get(family, [])]
    found.add_special_tokens({"additional_special_tokens": special})
    return found


@cache
def processor_of(family: str, marked: bool = True) -> Any:
    """A processor of the family, with Pillow's image processor."""
    tokenizer = tokenizer_of(family)
    if family == "paligemma":
        tokenizer.add_special_tokens({"bos_token": "<bos>"})
        pictures: Any = SiglipImageProcessorPil(size={"height": 28, "width": 28})
        pictures.image_seq_length = 4
        return PaliGemmaProcessor(pictures, tokenizer)
    is_qwen = family.startswith("qwen")
    mark = "<|vision_start|><|image_pad|><|vision_end|>" if is_qwen else "<image>"
    template = (TEMPLATE if marked else PLAIN).replace("IMAGE", mark)
    if family == "llava":
        size = {"height": 28, "width": 28}
        pictures = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size)
        return LlavaProcessor(
            pictures, tokenizer, patch_size=14, vision_feature_select_strategy="full",
            num_additional_image_tokens=1, chat_template=template,
        )  # fmt: skip
    if family == "llava_next":
        size = {"height": 28, "width": 28}
        pictures = LlavaNextImageProcessorPil(
            size={"shortest_edge": 28}, crop_size=size,
            image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
        )  # fmt: skip
        return LlavaNextProcessor(
            pictures, tokenizer, patch_size=14, vision_feature_select_strategy="default",
            num_additional_image_tokens=1, chat_template=template,
        )  # fmt: skip
    if family == "idefics3":
        pictures = Idefics3ImageProcessorPil(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
        )
        return Idefics3Processor(pictures, tokenizer, image_seq_len=4, chat_template=template)
    pictures = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}, patch_size=14, merge_size=2
    )
    made = Qwen2VLImages if family == "qwen2_vl" else Qwen2_5_VLImages
    return made(pictures, tokenizer, chat_template=template)


def model_of(family: str, attention: str = "eager") -> Any:
    """A random model of the family, in float64 so that sums may be compared."""
    torch.manual_seed(0)
    tokenizer = processor_of(family).tokenizer
    text = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    text |= {"max_position_embeddings": 4096, "use_cache": False, "pad_token_id": None}
    text |= {"bos_token_id": None, "eos_token_id": None}
    sight = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sight |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config: Any
    if family == "llava":
        config = LlavaConfig(
            text_config={"model_type": "llama", **text},
            vision_config={"model_type": "clip_vision_model", **sight, "projection_dim": 32},
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            vision_feature_select_strategy="full", vision_feature_layer=-1,
        )  # fmt: skip
        made: Any = LlavaForConditionalGeneration
    elif family == "llava_next":
        config = LlavaNextConfig(
            text_config={"model_type": "llama", **text},
            vision_config={"model_type": "clip_vision_model", **sight, "projection_dim": 32},
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            vision_feature_layer=-1, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
        )  # fmt: skip
        made = LlavaNextForConditionalGeneration
    elif family == "paligemma":
        config = PaliGemmaConfig(
            text_config={"model_type": "gemma", **text, "head_dim": 16},
            vision_config={"model_type": "siglip_vision_model", **sight, "vision_use_head": False},
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"), projection_dim=32,
        )  # fmt: skip
        made = PaliGemmaForConditionalGeneration
    elif family == "idefics3":
        sight["patch_size"] = 7
        config = Idefics3Config(
            text_config={"model_type": "llama", **text}, vision_config=sight, scale_factor=2,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"), use_cache=False,
        )  # fmt: skip
        made = Idefics3ForConditionalGeneration
    else:
        text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3]}
        sight = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
        sight |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
        if family == "qwen2_vl":
            of_config, made = Qwen2VLConfig, Qwen2VLForConditionalGeneration
            sight |= {"embed_dim": 32, "mlp_ratio": 2}
        else:
            of_config, made = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
            sight |= {"intermediate_size": 48, "out_hidden_size": 32, "window_size": 56}
            sight |= {"fullatt_block_indexes": [1]}
        config = of_config(
            text_config=text, vision_config=sight,
            image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
            video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        )  # fmt: skip
    config._attn_implementation = attention
    return made(config).double().eval()
