from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.compute as pc

from trainpipes import ConfigError, Pipeline, TableStage
from trainpipes_recipes.folders import rooted, warn_of_parts
from trainpipes_recipes.inputs import TEXTS, Input, OnBadRow, documented, whole_number

__all__ = ["speech"]

log = logging.getLogger("trainpipes")

#: How Whisper's tokenizer begins a text; the model puts it before the labels by itself.
START = "<|startoftranscript|>"

#: Common names of columns, the first one that is there is taken.
SOUNDS = ("audio", "sound", "wav", "flac", "mp3", "audio_filepath", "audio_path", "path", "bytes")
SAID = (
    *TEXTS, ("sentence",), ("transcription",), ("transcript",), ("normalized_text",), ("raw_text",), ("txt",),
)  # fmt: skip


@documented
def speech(
    files: Any,
    tokenizer: Any,
    *,
    audio: str | None = None,
    text: str | None = None,
    output: Literal["input_features", "input_values"] = "input_features",
    train: bool = True,
    on_error: OnBadRow = "raise",
    sampling_rate: int = 16_000,
    num_mels: int = 80,
    max_seconds: float = 30.0,
    max_length: int | None = None,
    normalize: bool = True,
    mask: bool = True,
    augment: bool = False,
    batch_size: int = 16,
    batch_seconds: float | None = None,
    buffer_size: int = 1024,
    seed: int = 0,
    num_shards: int = 24,
    folder: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches of speech and what is said, for training a recognizer.

    Each is a dict, named as in transformers. For models of spectrograms, such as Whisper:

        input_features   float32 ``[B, num_mels, frames]``, as ``log_mel`` makes them, padded to
                         ``max_seconds``: 3,000 frames are 30 s
        labels           int64 ``[B, M]``, the text's tokens, end-of-text, then -100; without Whisper's
                         "<|startoftranscript|>", which the model puts before them

    With ``output="input_values"`` for models of samples with CTC, such as Wav2Vec2, HuBERT and WavLM:

        input_values     float32 ``[B, L]``, the samples, then 0
        attention_mask   int64 ``[B, L]``, 1 on samples
        labels           int64 ``[B, M]``, the text's tokens, then -100

    Rows longer than ``max_seconds`` or ``max_length`` are left out, so that each shard's last batch of an
    epoch may be short. To train, batches of samples have rows of about one length, in an order that is even
    over ranks.

    Args:
        tokenizer: as in ``tokenize``; or "characters:" and an alphabet, whose characters are numbered from
            2 on: 0 is the padding, which is CTC's blank, 1 any other character. The log warns once
            where these are 1 % of the texts.
        audio: column of the sounds: bytes, paths, URLs, or structs with ``bytes`` or ``path``; by default
            the first of audio, sound, wav, flac, mp3 and a few more.
        text: column of transcripts; by default the first of text, sentence, transcription and a few
            more.
        output: "input_features" or "input_values": the model's input.
        on_error: for sounds that cannot be decoded, and texts that are null: "raise"; or "skip" and log
            how many. A sound that turns out damaged when it is decoded leaves its batch with a row less.
        sampling_rate: to which sounds are resampled.
        num_mels: bands of a spectrogram.
        max_seconds: of a sound.
        max_length: the most tokens of a text; by default 448, which is Whisper's limit, and with
            "input_values" any number.
        normalize: with "input_values", a mean of 0 and a variance of 1 for each sound.
        mask: with "input_values", whether there is an "attention_mask": models whose configuration says
            ``feat_extract_norm="group"``, such as wav2vec2-base, are trained without.
        augment: with "input_features", to train, mask spans of time, of the sound and not its padding, and
            of frequency: see ``mask_spans``.
        batch_seconds: with "input_values", to train, instead of ``batch_size``: the most seconds of a
            batch, padding included; a longer sound is a batch of its own.
        seed: for the order of rows and the masks.
        folder: that paths are relative to; by default the folder of ``files``; of a list, or of a
            pattern of several folders, that of each row's file.

    Raises:
        UnreadableError: a sound cannot be decoded.

    >>> import io, numpy as np, soundfile, trainpipes as tp
    >>> sound = io.BytesIO()
    >>> soundfile.write(sound, np.zeros(8000), 8000, format="WAV")
    >>> rows = tp.from_dataset([{"audio": sound.getvalue(), "text": "hush"}] * 4)
    >>> batch = speech(rows, "bytes", batch_size=2, num_shards=1).peek()
    >>> batch["input_features"].shape, batch["labels"].tolist()[0]
    (torch.Size([2, 80, 3000]), [104, 117, 115, 104, 256])
    >>> options = {"output": "input_values", "batch_seconds": 3, "num_shards": 1}
    >>> speech(rows, "characters:hus", **options).peek()["labels"].tolist()
    [[2, 3, 4, 2], [2, 3, 4, 2], [2, 3, 4, 2]]
    """
    outputs = ("input_features", "input_values")
    if output not in outputs:
        raise ConfigError(f"speech(output) must be one of {', '.join(outputs)}, got {output!r}")
    spectrograms = output == "input_features"
    if spectrograms and batch_seconds is not None:
        way = 'pass batch_size, since each sound is padded to max_seconds, or output="input_values"'
        rule = 'is for output="input_values"'
        raise ConfigError(f"speech(batch_seconds) {rule}, got {batch_seconds}; {way}")
    if augment and not spectrograms:
        way = (
            'leave it out, as models of samples mask by themselves, or pass output="input_features"'
        )
        raise ConfigError(f'speech(augment) is for output="input_features", got {augment}; {way}')
    if max_length is not None:
        whole_number(max_length, 1, "speech(max_length)", "tokens")
    elif spectrograms:
        max_length = 448
    alphabet = None
    if isinstance(tokenizer, str) and tokenizer.startswith("characters:"):
        if spectrograms:
            rule = 'must be one with an end-of-text token for output="input_features"'
            way = 'give that of the model, or pass output="input_values"'
            raise ConfigError(f"speech(tokenizer) {rule}, got {tokenizer!r}; {way}")
        alphabet = tokenizer.partition(":")[2]
        tokenizer = characters(alphabet)
    data = Input("speech", files, storage_options)
    (audio,) = data.find({"audio": audio}, [(name,) for name in SOUNDS])
    (text,) = data.find({"text": text}, [(name,) for (name,) in SAID if name != audio])
    warn_of_parts(data, audio, text)
    rows = data.rows([audio, text], texts=[text]).rename({audio: output, text: "labels"})
    rows = data.arrange(rows, train, buffer_size, seed, num_shards)
    rows, folder = rooted(rows, output, files, folder, storage_options)
    reading: Any = {"on_error": on_error, "storage_options": storage_options, "folder": folder}
    rows = rows.audio_info(output, sampling_rate=sampling_rate, **reading)
    rows = rows.filter(pc.field(f"{output}_seconds") <= max_seconds)
    if alphabet is not None:
        rows = rows.then(KnownCharacters(alphabet))
    rows = rows.tokenize(
        tokenizer, {"labels": "labels"}, add_eos=spectrograms,
        on_error=None if on_error == "raise" else on_error,
    )  # fmt: skip
    tokenize: Any = rows.stages[-1]
    start = tokenize.maker.token_id(START) if spectrograms else None
    if start is not None:
        rows = rows.then(WithoutStart(start))
    if max_length is not None:
        rows = rows.filter(pc.list_value_length(pc.field("labels")) <= max_length)
    length = f"{output}_samples"
    if spectrograms or not train:
        batches = rows.batch(batch_size)
    elif batch_seconds is None:
        batches = rows.bucket_by_length(
            batch_size, column=length, buffer_size=buffer_size, seed=seed
        )
    else:
        most = round(batch_seconds * sampling_rate)
        batches = rows.bucket_by_length(
            max_tokens=most, column=length, buffer_size=buffer_size, overflow="alone", seed=seed
        )
    batches = batches.select(output, "labels")
    normalize = normalize and not spectrograms
    batches = batches.decode_audio(output, sampling_rate, normalize=normalize, **reading)
    if not spectrograms:
        return batches.pad_collate(
            padding_side="right", mask={output: "attention_mask"} if mask else False
        )
    frames = "frames" if augment and train else None
    batches = batches.log_mel(
        num_mels,
        column=output,
        sampling_rate=sampling_rate,
        pad_seconds=max_seconds,
        frames_column=frames,
    )
    if frames is not None:
        batches = batches.mask_spans(frames_column=frames, seed=seed).drop_columns(frames)
    return batches.pad_collate(padding_side="right", mask=False)


class WithoutStart(TableStage):
    """Labels without a token that they begin with."""

    thread_safe = True

    start: int

    def apply(self, table: pa.Table) -> pa.Table:
        labels = table["labels"]
        begins = pc.equal(pc.list_element(labels, 0), self.start)
        rest = pc.if_else(begins, pc.list_slice(labels, 1), labels)
        return table.set_column(table.column_names.index("labels"), "labels", rest)


class KnownCharacters(TableStage):
    """Warns once where 1 % of the characters of texts are not in the alphabet."""

    thread_safe = True

    alphabet: str
    #: How often each character came in this process; None when it has warned.
    counts: ClassVar[Counter[str] | None] = Counter()

    def apply(self, table: pa.Table) -> pa.Table:
        if self.counts is None:
            return table
        texts = (text for text in table["labels"].to_pylist() if isinstance(text, str))
        counts = self.counts + Counter("".join(texts))
        unknown = Counter({c: n for c, n in counts.items() if c not in self.alphabet})
        warns = 10 <= unknown.total() >= 0.01 * counts.total()
        vars(self)["counts"] = None if warns else counts
        if warns:
            some = ", ".join(repr(character) for character, _ in unknown.most_common(8))
            said = (
                "speech: %s of the first %s characters are not in %r, and have the same label: %s"
            )
            log.warning(
                f"{said}; put them into the alphabet, or write texts with it by map()",
                f"{unknown.total():,}", f"{counts.total():,}", f"characters:{self.alphabet}", some,
            )  # fmt: skip
        return table


def characters(alphabet: str) -> Any:
    """
    >>> characters("ab ").encode("a bc").ids
    [2, 4, 3, 1]
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    pieces = ["<pad>", "<unk>", *dict.fromkeys(alphabet)]
    known = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return tokenizer
