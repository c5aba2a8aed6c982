from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainpipes import ConfigError, Pipeline
from trainpipes_recipes.folders import metadata_in
from trainpipes_recipes.inputs import CONVERSATIONS, PAIRS, Input, OnBadRow, balanced, documented
from trainpipes_recipes.vision import Processor
from trainpipes_recipes.vision_pack import PackBatches
from trainpipes_recipes.vision_rows import VisionBatches, VisionRows

__all__ = ["vision_chat"]

#: Common names of columns of pictures, the first one that is there is taken.
PICTURES = (
    "images", "image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp",
    "image_path", "file_name",
)  # fmt: skip


@documented
def vision_chat(
    files: Any,
    processor: Any,
    *,
    messages: str | None = None,
    prompt: str | None = None,
    response: str | None = None,
    images: str | None = None,
    template: str | None = None,
    roles: Mapping[str, str] | None = None,
    train: bool = True,
    on_error: OnBadRow = "raise",
    max_length: int = 4096,
    packed: bool = False,
    max_tokens: int | None = None,
    batch_size: int = 8,
    balance: int | None = None,
    buffer_size: int = 1024,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for fine-tuning a vision-language model on conversations with pictures.

    Each is one call of the processor on its rows, and so has all that the model's ``forward``
    takes, B = ``batch_size``, L the longest row with the tokens of its pictures:

        input_ids        int64 [B, L], then padding
        attention_mask   int64 [B, L], 1 on tokens
        pixel_values     float32, and what else belongs to the pictures, as the model takes it
        labels           int64 [B, L]: what the assistant says, -100 elsewhere

    Labels are not shifted: compare the logits at position t with the label at t + 1.

    A row is a conversation, or a prompt and a response, and a list of pictures: none, one or
    several. Pictures are bytes, structs of bytes and path as Hugging Face's datasets have them,
    paths from the data file's folder on, URLs, or uint8 arrays ``[C, H, W]``. They stand where the
    content has ``{"type": "image"}``, or a text ``<image>``, or else before the user's first text.
    They are decoded when their batch is made.

    Args:
        processor: of transformers, with a chat template and an image processor, or PaliGemma's;
            or its name or folder.
        messages: column of the conversations; by default the first of messages, conversations,
            conversation, dialog, chat and json.
        prompt: column of the user's text, if there are no conversations.
        response: column of the assistant's answer.
        images: column of the pictures; by default the first of images, image, img, picture, photo,
            jpg, jpeg, png and webp.
        template: a Jinja template in place of the processor's own.
        on_error: for rows whose roles are not in order, whose pictures are missing, damaged or of
            another number than their places, or that are too long: "raise"; or "skip" and log how
            many.
        max_length: the most tokens of a row with its pictures.
        packed: let several rows share one of L = ``max_length`` tokens, B of these in a batch; the
            model then sees each alone, as ``position_ids`` tell it. In place of "attention_mask"
            a batch has "position_ids" (int64 ``[B, L]``; ``[4, B, L]`` for Qwen-VL), "cu_seqlens"
            and "max_seqlen" (see ``pad_collate``). The number of batches is not known.
        storage_options: of the file system of the files, and of pictures at URLs: those of the files'
            own scheme ("s3://"), or all where files are on disk.
        max_tokens: instead of ``batch_size``: the most tokens in a batch, rows x longest row. Rows
            of about one length come together, and ``balance`` is not needed.
        buffer_size: the fewest rows that the shuffle mixes with each other, and the most that are
            packed or sorted by length together; their pictures wait as bytes or paths.

    Raises:
        UnreadableError: a picture is missing or damaged.
        DataError: another row is bad.
    """
    if packed and max_tokens is not None:
        rule = "is for rows that are not packed, since batch_size and max_length say what packed ones hold"
        raise ConfigError(
            f"vision_chat(max_tokens) {rule}, got {max_tokens}; leave one of them out"
        )
    files = metadata_in(files, storage_options)
    data = Input("vision_chat", files, storage_options)
    talks = [*CONVERSATIONS, ("json",)]
    if prompt is None and response is None and (messages or _has(data, talks)):
        texts = data.find({"messages": messages}, talks)
    else:
        texts = data.find({"prompt": prompt, "response": response}, PAIRS)
    if images is None:
        images = next((name for name in PICTURES if name in data.columns), None)
    own = Processor(processor, template)
    columns = [*texts] if images is None else [*texts, images]
    # Python's rows stay as they are: contents of text and of parts make no column.
    rows = data.rows(None if isinstance(files, Pipeline) else columns)
    rows = data.arrange(rows, train, buffer_size, seed, num_shards)
    longest = max_length if max_tokens is None else min(max_length, max_tokens)
    talk = texts[0] if len(texts) == 1 else texts
    rows = rows.then(
        VisionRows(
            own, talk, images, roles=roles, max_length=longest, on_error=on_error,
            storage_options=storage_options,
        )
    )  # fmt: skip
    if packed:
        rows = rows.then(
            PackBatches(max_length, rows=batch_size, buffer_size=buffer_size, seed=seed)
        )
        rows = balanced(rows, balance, train, column="length", cost="attention")
        return rows.then(VisionBatches(own, max_length=max_length, on_error=on_error))
    if max_tokens is None:
        rows = rows.batch(batch_size, drop_last=train and drop_last)
        rows = balanced(rows, balance, train, column="length")
    else:
        rows = rows.bucket_by_length(
            max_tokens=max_tokens, column="length", buffer_size=buffer_size, seed=seed
        )
    return rows.then(VisionBatches(own, on_error=on_error))


def _has(data: Input, known: Sequence[Sequence[str]]) -> bool:
    return any({*names} <= {*data.columns} for names in known)
