"""The recipe for speech recognition: what its batches hold, and what it refuses."""

from __future__ import annotations

import io
import json
import math
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from sound_fixtures import encoded, tone
from torch_settings import torch_as_before

ALPHABET = "characters:abc "


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 sounds of 0.2 to 1 s at 8,000 Hz; number 7 is damaged, and number 9 takes 3 s."""
    folder, lines = tmp_path_factory.mktemp("speech"), []
    for n in range(40):
        content = encoded(tone(3 if n == 9 else 0.2 + n / 50, 8000, seed=n), 8000)
        (folder / f"{n}.wav").write_bytes(content if n != 7 else content[:500])
        lines.append(json.dumps({"audio": f"{n}.wav", "text": "ab c"[: 1 + n % 4]}))
    (folder / "speech.jsonl").write_text("\n".join(lines))
    return folder / "speech.jsonl"


def small_ears(**options: Any) -> Any:
    from transformers import Wav2Vec2Config

    return Wav2Vec2Config(
        vocab_size=6, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(16, 16), conv_kernel=(10, 8), conv_stride=(40, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
        pad_token_id=0, ctc_loss_reduction="mean", **options,
    )  # fmt: skip


def batches(manifest: Any, tokenizer: Any = "bytes", **options: Any) -> list[dict[str, Any]]:
    options = {"on_error": "skip", "max_seconds": 2, "num_shards": 2, "batch_size": 4, **options}
    return list(tp.recipe("speech", files=manifest, tokenizer=tokenizer, **options))


def test_spectrograms_are_whispers(manifest: Path) -> None:
    from transformers import WhisperFeatureExtractor

    found = batches(manifest, train=False)
    assert sum(len(batch["labels"]) for batch in found) == 38
    (first,) = batches(manifest, train=False, num_shards=1, batch_size=40)
    assert first.keys() == {"input_features", "labels"}
    assert first["input_features"].shape == (38, 80, 200)
    assert first["labels"][:2].tolist() == [[97, 256, -100, -100, -100], [97, 98, 256, -100, -100]]
    rows = tp.read_json(manifest).decode_audio(
        sampling_rate=16_000, folder=manifest.parent, on_error="skip"
    )
    sounds = [row["audio"] for row in rows if len(row["audio"]) <= 32_000]
    extractor = WhisperFeatureExtractor(chunk_length=2)
    wanted = extractor(sounds, sampling_rate=16_000, return_tensors="pt")["input_features"]
    assert (first["input_features"] - wanted).abs().max() < 1e-4


def test_samples_are_wav2vec2s(manifest: Path) -> None:
    from transformers import Wav2Vec2FeatureExtractor

    options: dict[str, Any] = {
        "output": "input_values",
        "train": False,
        "num_shards": 1,
        "batch_size": 40,
    }
    (found,) = batches(manifest, ALPHABET, **options)
    rows = tp.read_json(manifest).decode_audio(
        sampling_rate=16_000, folder=manifest.parent, on_error="skip"
    )
    sounds = [row["audio"] for row in rows if len(row["audio"]) <= 32_000]
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=True)
    wanted = extractor(sounds, sampling_rate=16_000, padding=True, return_tensors="pt")
    assert found.keys() == {*wanted, "labels"}
    assert (found["input_values"] - wanted["input_values"]).abs().max() < 1e-4
    assert found["attention_mask"].equal(wanted["attention_mask"].long())
    assert found["labels"][1:4].tolist() == [[2, 3, -100, -100], [2, 3, 5, -100], [2, 3, 5, 4]]


def test_batches_of_samples_are_made_by_seconds(manifest: Path) -> None:
    found = batches(manifest, ALPHABET, output="input_values", batch_seconds=3)
    assert sum(len(batch["labels"]) for batch in found) == 38
    assert max(batch["input_values"].numel() for batch in found) <= 3 * 16_000
    padding = sum(int((batch["attention_mask"] == 0).sum()) for batch in found)
    assert padding < 0.2 * sum(batch["input_values"].numel() for batch in found)


def test_texts_of_more_tokens_are_left_out(manifest: Path) -> None:
    found = batches(manifest, max_length=3, train=False)
    assert sum(len(batch["labels"]) for batch in found) == 19  # of 1 or 2 letters, and the end
    assert all((batch["labels"] == 256).sum(1).eq(1).all() for batch in found)
    with pytest.raises(
        tp.ConfigError, match=r"speech\(max_length\) must be an integer of 1 or more"
    ):
        batches(manifest, max_length=0)


@pytest.mark.parametrize(("output", "rows"), [("input_values", 2), ("input_features", 1)])
def test_whispers_limit_of_tokens_is_not_that_of_samples(output: Any, rows: int) -> None:
    sound = encoded(tone(0.2, 8000), 8000)
    data = tp.from_dataset([{"audio": sound, "text": "a" * n} for n in (447, 600)])
    options: dict[str, Any] = {"output": output, "batch_size": 2, "num_shards": 1, "train": False}
    (batch,) = tp.recipe("speech", data, "bytes", max_seconds=1, **options)
    assert len(batch["labels"]) == rows
    longest = 600 if output == "input_values" else 448
    assert int((batch["labels"] >= 0).sum(1).max()) == longest


def test_characters_outside_the_alphabet_are_warned_of_once(
    manifest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"output": "input_values", "train": False}
    batches(manifest, ALPHABET, **options)
    assert "are not in" not in caplog.text
    for alphabet in ("ABC ", "abc"):
        caplog.clear()
        batches(manifest, f"characters:{alphabet}", **options)
        (said,) = (r.message for r in caplog.records if "characters are not in" in r.message)
        assert f"are not in 'characters:{alphabet}'" in said
        assert ("' ';" if alphabet == "abc" else "'a', 'b', 'c';") in said


def test_models_with_group_norm_get_no_mask(manifest: Path) -> None:
    options: dict[str, Any] = {"output": "input_values", "train": False}
    masked, plain = (batches(manifest, ALPHABET, mask=mask, **options) for mask in (True, False))
    for with_mask, without in zip(masked, plain, strict=True):
        assert without.keys() == {"input_values", "labels"}
        assert without["input_values"].equal(with_mask["input_values"])


def test_evaluation_has_all_rows_in_file_order(manifest: Path) -> None:
    options: dict[str, Any] = {
        "train": False,
        "augment": True,
        "on_error": "skip",
        "max_seconds": 2,
    }
    pipe = tp.recipe("speech", manifest, tokenizer="bytes", num_shards=6, batch_size=4, **options)
    whole = [batch["input_features"] for batch in pipe]
    assert all(map(torch.equal, whole, (batch["input_features"] for batch in pipe)))
    ranks = [list(pipe.distributed(rank=rank, world_size=2)) for rank in range(2)]
    apart = [batch["input_features"] for rank in ranks for batch in rank]
    assert {t.numpy().tobytes() for t in apart} == {t.numpy().tobytes() for t in whole}


def test_masks_are_of_training_alone(manifest: Path) -> None:
    plain, masked = (batches(manifest, augment=augment) for augment in (False, True))
    for before, after in zip(plain, masked, strict=True):
        changed = before["input_features"] != after["input_features"]
        assert changed.any()
        assert not after["input_features"][changed].any()
        padding = (before["input_features"] == before["input_features"][..., -1:]).all(1)
        assert padding.any(1).all()
        assert not (changed.all(1) & padding).any()


@pytest.mark.usefixtures("torch_as_before")
def test_a_step_of_ctc_makes_its_loss_smaller(manifest: Path) -> None:
    from transformers import Wav2Vec2ForCTC

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Wav2Vec2ForCTC(small_ears())
    found = batches(manifest, ALPHABET, output="input_values", batch_seconds=4)[:3]
    before = sum(model(**batch).loss for batch in found)
    before.backward()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:
                weight -= 0.01 * weight.grad / len(found)
        after = sum(model(**batch).loss for batch in found)
    assert 0 < after < before


def test_labels_leave_the_start_to_whisper(manifest: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.models.whisper.modeling_whisper import shift_tokens_right

    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|notimestamps|>"]
    known = {token: n for n, token in enumerate([*special, "a", "b", "c", " "])}
    fast = Tokenizer(models.WordLevel(known, unk_token=" "))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.post_processor = processors.TemplateProcessing(
        single=" ".join([*special[1:], "$A", special[0]]),
        special_tokens=[(token, known[token]) for token in special],
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=special[0])
    found = batches(manifest, tokenizer, train=False, num_shards=1, batch_size=40)
    labels = found[0]["labels"]
    assert labels[:2].tolist() == [[2, 3, 4, 0, *[-100] * 3], [2, 3, 4, 5, 0, *[-100] * 2]]
    shifted = shift_tokens_right(labels, 0, known["<|startoftranscript|>"])
    assert shifted[0].tolist() == [1, 2, 3, 4, 0, 0, 0]


def trained(manifest: Path, folder: Path, ears: Any, tokenizer: str, steps: int) -> list[Any]:
    """Train with CTC; the batch of each step and its loss."""
    from trainpipes_recipes import train_speech

    ears.save_pretrained(folder / "ears")
    found: list[Any] = []
    with torch_as_before():
        torch.set_num_threads(1)  # several, on a busy machine, wait for each other
        train_speech.main(
            [
                "--model", f"{folder}/ears", "--scratch", "--ctc", "--tokenizer", tokenizer, "--files",
                str(manifest), "--output", f"{folder}/run", "--steps", str(steps), "--batch-size", "1",
            ],
            on_step=lambda step, batches, loss: found.append((batches[0], loss)),
        )  # fmt: skip
    return found


@pytest.mark.parametrize("norm", ["group", "layer"])
def test_training_gives_a_mask_to_models_that_were_trained_with_one(
    norm: str, manifest: Path, tmp_path: Path
) -> None:
    ((batch, _),) = trained(manifest, tmp_path, small_ears(feat_extract_norm=norm), ALPHABET, 1)
    assert {*batch} == {"input_values", "labels"} | (
        {"attention_mask"} if norm == "layer" else set()
    )


def test_a_text_too_long_for_its_sound_spoils_no_weights(tmp_path: Path) -> None:
    (tmp_path / "0.wav").write_bytes(encoded(tone(0.3, 8000), 8000))
    rows = [{"audio": "0.wav", "text": "abc" * (60 if n % 4 == 3 else 1)} for n in range(40)]
    (tmp_path / "speech.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = trained(tmp_path / "speech.jsonl", tmp_path, small_ears(), ALPHABET, 12)
    losses = [loss.item() for _, loss in found]
    assert [loss == 0 for loss in losses] == [batch["labels"].numel() > 100 for batch, _ in found]
    assert 0 < sum(loss == 0 for loss in losses) < 12
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("letters", ["abc ", "abcdefgh "])
def test_a_model_has_an_output_for_each_character(
    letters: str, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCTC

    outputs = max(6, 2 + len(letters))
    trained(manifest, tmp_path, small_ears(), f"characters:{letters}", 1)
    assert AutoModelForCTC.from_pretrained(tmp_path / "run/model").config.vocab_size == outputs
    said = f"the model has 6 outputs: new ones for {outputs} tokens, to be trained"
    assert (said in capsys.readouterr().out) == (outputs > 6)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_paths_begin_at_the_folder_of_their_own_file(tmp_path: Path, ending: str) -> None:
    files = []
    for n in (1, 2):
        folder = tmp_path / str(n)
        folder.mkdir()
        (folder / "a.wav").write_bytes(encoded(tone(n / 10, 8000), 8000))
        row: dict[str, Any] = {"audio": "a.wav", "text": "a" * n}
        if ending == "parquet":
            row["audio"] = {"bytes": None, "path": "a.wav"}
            pq.write_table(pa.Table.from_pylist([row]), folder / "x.parquet")
        else:
            (folder / "x.jsonl").write_text(json.dumps(row))
        files.append(folder / f"x.{ending}")
    options: dict[str, Any] = {"output": "input_values", "train": False, "on_error": "raise"}
    (batch,) = batches(files, ALPHABET, num_shards=1, **options)
    assert batch["attention_mask"].sum(1).tolist() == [1600, 3200]
    assert (batch["labels"] == 2).sum(1).tolist() == [1, 2]
    (batch,) = batches(f"{tmp_path}/*/x.{ending}", ALPHABET, num_shards=1, **options)
    assert batch["attention_mask"].sum(1).tolist() == [1600, 3200]
    (batch,) = batches(files[:1], ALPHABET, num_shards=1, **options)
    assert batch["labels"].tolist() == [[2]]
    with pytest.raises(tp.errors.UnreadableError, match=r"(?i)no such file"):
        batches(files[1], ALPHABET, folder=tmp_path, **options)


def test_texts_of_tar_archives_are_bytes(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "speech.tar", "w") as archive:
        for n in range(4):
            for ending, content in (
                ("flac", encoded(tone(0.1 + n / 10, 8000), 8000, "FLAC")), ("txt", b"a" * (n + 1))
            ):  # fmt: skip
                member = tarfile.TarInfo(f"{n}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    options: dict[str, Any] = {"output": "input_values", "train": False, "num_shards": 1}
    (batch,) = batches(tmp_path / "speech.tar", ALPHABET, **options)
    assert batch["attention_mask"].sum(1).tolist() == [1600, 3200, 4800, 6400]
    assert (batch["labels"] == 2).sum(1).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "value", "warns"), [("offset", 2, True), ("offset", 0.0, False), ("begin", 0.5, True)]
)
def test_parts_of_files_that_a_manifest_names_are_warned_of(
    name: str, value: float, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.wav").write_bytes(encoded(tone(1, 8000), 8000))
    rows = [{"audio": "a.wav", "text": "ab", name: at} for at in (0, value)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tp.recipe("speech", tmp_path / "x.jsonl", "bytes")
    said = f"speech: column {name!r} is not used, and each row has its file as a whole"
    assert (said in caplog.text) == warns


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("corpus-17.0", "."), ("corpus-17.0", "*.jsonl"), ("corpus [17]", "."),
        ("corpus [17]", "speech.jsonl"),
    ],
)  # fmt: skip
def test_paths_begin_at_a_folder_with_an_odd_name(
    manifest: Path, tmp_path: Path, name: str, file: str
) -> None:
    folder = shutil.copytree(manifest.parent, tmp_path / name)
    assert sum(len(batch["labels"]) for batch in batches(folder / file, train=False)) == 38


def test_what_it_refuses(manifest: Path) -> None:
    with pytest.raises(tp.errors.UnreadableError, match=r"cut off.*speech.jsonl, row 7"):
        batches(manifest, on_error="raise")
    with pytest.raises(tp.ConfigError, match=r"speech\(output\) must be one of input_features"):
        batches(manifest, output="samples")
    with pytest.raises(tp.ConfigError, match="pass batch_size, since"):
        batches(manifest, batch_seconds=3)
    with pytest.raises(
        tp.ConfigError, match=r"end-of-text token for .*, got 'characters:abc '; give"
    ):
        batches(manifest, ALPHABET)
    with pytest.raises(tp.ConfigError, match=r"speech\(augment\) is for output="):
        batches(manifest, augment=True, output="input_values")
    with pytest.raises(tp.errors.SchemaError, match="no column found for the audio"):
        tp.recipe("speech", tp.from_dataset([{"x": "a", "text": "b"}]), tokenizer="bytes")
