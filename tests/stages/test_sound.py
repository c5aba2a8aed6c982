"""Sound from files: what is decoded, which part of it, and what cannot be."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from sound_fixtures import by_ffmpeg, encoded, tone
from video_fixtures import video

FORMATS = [("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAV", "FLOAT"), ("WAV", "ULAW"), ("WAV", "ALAW"),
    ("WAV", "PCM_U8"), ("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("MP3", None),
    ("AIFF", "PCM_16"), ("AU", "PCM_16"), ("CAF", "ALAC_16"), ("W64", "PCM_16")]  # fmt: skip
#: Of FFmpeg's containers, codecs, and how far clips may lie from their place, in seconds.
CONTAINERS = [
    ("mp4", "aac", 0.0),
    ("webm", "libopus", 0.001),
    ("adts", "aac", 0.0),
    ("mpegts", "aac", 0.0),
]


def heard(content: Any, **options: Any) -> Any:
    (row,) = tp.from_dataset([{"audio": content}]).decode_audio(**options)
    return row["audio"]


def rows_of(*contents: Any) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"audio": list(contents), "x": range(len(contents))}))


@pytest.mark.parametrize(("format", "subtype"), FORMATS)
def test_what_was_written_comes_back(format: str, subtype: str | None) -> None:
    samples = tone(3, 16_000)
    content = encoded(samples, 16_000, format, subtype)
    whole = heard(content)
    assert whole.dtype == np.float32
    assert whole.flags.c_contiguous
    assert whole.shape == (48_000,)
    loss = 0.25 if format in ("OGG", "MP3") else 0.06
    assert np.abs(whole - samples[:, 0]).max() < loss
    part = heard(content, start=1.3, duration=0.7)
    assert np.allclose(part, whole[20_800:32_000], rtol=0, atol=1e-6)


def sound_with_pauses(seconds: int, rate: int, channels: int) -> Any:
    """A chord, and noise between pauses, of which a frame of MP3 has few bytes."""
    time = np.arange(seconds * rate) / rate
    chord = sum(0.15 * np.sin(2 * np.pi * pitch * time) for pitch in (220, 277, 330))
    noise = np.random.default_rng(0).standard_normal(len(time)) * (time % 3 < 0.2) * 0.2
    samples = np.where(time < seconds / 2, chord, noise).astype(np.float32)
    return np.stack([samples, np.roll(samples, rate // 7)][:channels], axis=1)


@pytest.mark.sample(7)
@pytest.mark.parametrize("container", [None, "mp4"])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [16_000, 24_000, 44_100, 48_000])
def test_a_part_of_mp3_is_that_of_the_whole(
    rate: int, channels: int, container: str | None
) -> None:
    samples = sound_with_pauses(12, rate, channels)
    if container is None:
        content = encoded(samples, rate, "MP3", bitrate_mode="VARIABLE", compression_level=0.5)
    else:
        lowest = 8_000 if rate < 32_000 else 32_000
        content = by_ffmpeg(samples, rate, container, "libmp3lame", bit_rate=lowest)
    whole = heard(content, mono=False).reshape(channels, -1)
    for start in (0.0, 0.1, 2.0, 5.9, *np.arange(8.9, 9.2, 0.05), 11.7):
        first = round(start * rate)
        part = heard(content, start=start, duration=0.3, mono=False).reshape(channels, -1)
        expected = whole[:, first : first + round(0.3 * rate)]
        assert part.shape == expected.shape, start
        assert np.abs(part - expected).max() < 1e-4, start


def test_a_long_mp3_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(sound_with_pauses(12, 16_000, 1), 16_000, "MP3", bitrate_mode="VARIABLE")
    whole = heard(content)
    monkeypatch.setattr("trainpipes.media.sound.AT_ONCE", 7_000)
    assert np.abs(heard(content) - whole).max() < 1e-4


@pytest.mark.parametrize("timed", [None, True, False])
def test_ogg_opus_is_in_its_place_whoever_wrote_it(timed: bool | None) -> None:
    samples = np.zeros((96_000, 1), dtype=np.float32)
    samples[[24_000, 72_000]] = 0.9
    if timed is None:
        content = encoded(samples, 48_000, "OGG", "OPUS")
    else:  # without times, FFmpeg does not count the samples that are to be skipped
        content = by_ffmpeg(samples, 48_000, "ogg", "libopus", timed=timed)
    whole, part = heard(content), heard(content, start=1.0)
    assert len(whole) == 96_000
    assert [np.abs(half).argmax() for half in (whole[:48_000], whole[48_000:], part)] == [
        24_000
    ] * 3


@pytest.mark.parametrize(("container", "codec", "off"), CONTAINERS)
def test_what_ffmpeg_knows_is_decoded_by_it(container: str, codec: str, off: float) -> None:
    samples = tone(4, 48_000, noise=0)
    content = by_ffmpeg(samples, 48_000, container, codec)
    whole = heard(content)
    assert abs(len(whole) - 4 * 48_000) < 4096
    shifts = range(round(-off * 48_000), round(off * 48_000) + 1)
    part = heard(content, start=2.5, duration=0.5)
    assert part.shape == (24_000,)
    # AAC draws noise anew, and Opus needs a while: what is tested is the place.
    assert min(np.abs(part - whole[120_000 + n : 144_000 + n]).max() for n in shifts) < 5e-3


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000])
def test_a_part_of_opus_is_in_its_place_whatever_the_rate_of_the_source(rate: int) -> None:
    content = by_ffmpeg(tone(4, rate, noise=0), rate, "webm", "libopus")
    whole, part = heard(content), heard(content, start=2.5, duration=0.5)
    shifts = range(-48, 49)  # a millisecond, which is Matroska's tick
    assert min(np.abs(part - whole[120_000 + n : 144_000 + n]).max() for n in shifts) < 5e-3


def test_the_sound_of_a_video_is_decoded() -> None:
    content = by_ffmpeg(tone(2, 44_100, 2), 44_100, "mp4", "aac", video=True)
    sound = heard(content, sampling_rate=16_000, mono=False)
    assert sound.shape[0] == 2
    assert abs(sound.shape[1] - 32_000) < 800


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1, 7_999, -2, -1])
@pytest.mark.parametrize(("channels", "rate"), [(1, 48_000), (2, 44_100), (2, 8_000), (1, 16_000)])
def test_a_sample_that_is_no_number_is_refused_after_resampling(
    channels: int, rate: int, place: int, value: float
) -> None:
    samples = tone(1, rate)[:, :1].repeat(channels, axis=1)
    samples[place, -1] = value
    content = encoded(samples, rate, "WAV", "FLOAT")
    with pytest.raises(tp.UnreadableError, match="infinite or no numbers"):
        heard(content, sampling_rate=16_000)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000, 192_000])
def test_resampling_and_mixing(rate: int) -> None:
    time = np.arange(rate) / rate
    left = 0.5 * np.sin(2 * np.pi * 440 * time)
    content = encoded(np.stack([left, -0.2 * left], axis=1), rate)
    mono = heard(content, sampling_rate=16_000)
    assert mono.shape == (16_000,)
    expected = 0.4 * 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert np.abs(mono - expected)[200:-200].max() < 1e-3
    both = heard(content, sampling_rate=16_000, mono=False)
    assert both.shape == (2, 16_000)
    assert np.abs(both[1] + 0.2 * both[0]).max() < 1e-3


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100])
@pytest.mark.parametrize("samples", [2, 3, 999, 12_345])
def test_info_counts_the_samples_that_are_decoded(rate: int, samples: int) -> None:
    content = encoded(tone(1, samples), rate)
    rows = rows_of(content).audio_info(sampling_rate=16_000)
    (row,) = rows.decode_audio(sampling_rate=16_000)
    assert row["audio_samples"] == len(row["audio"])
    assert row["audio_seconds"] == samples / rate
    assert (row["audio_sampling_rate"], row["audio_channels"]) == (rate, 1)


def test_info_decodes_nothing_and_keeps_columns_of_arrow() -> None:
    contents = [encoded(tone(n / 10)) for n in (1, 3, 2)]
    rows = rows_of(*contents).audio_info().filter(pc.field("audio_seconds") < 0.25)
    assert [row["x"] for row in rows] == [0, 2]
    with pytest.raises(tp.errors.SchemaError, match="have a column 'audio_seconds' already"):
        list(rows_of(*contents).audio_info().audio_info())


def test_bytes_paths_urls_and_structs(tmp_path: Path) -> None:
    content = encoded(tone(0.1))
    (tmp_path / "a.wav").write_bytes(content)
    fsspec.filesystem("memory").pipe_file("/sounds/a.wav", content)
    expected = heard(content)
    alike: list[tuple[Any, dict[str, Any]]] = [
        (bytearray(content), {}), (memoryview(content), {}), (str(tmp_path / "a.wav"), {}),
        (tmp_path / "a.wav", {}), (f"file://{tmp_path}/a.wav", {}), ("a.wav", {"folder": tmp_path}),
        ("memory://sounds/a.wav", {}), ("a.wav", {"folder": "memory://sounds"}),
        ({"bytes": content, "path": "gone.wav"}, {}), ({"bytes": None, "path": str(tmp_path / "a.wav")}, {}),
        ({"path": str(tmp_path / "a.wav")}, {}),
    ]  # fmt: skip
    for value, options in alike:
        assert np.array_equal(heard(value, **options), expected)
        part = heard(value, start=0.05, **options)
        assert np.array_equal(part, expected[800:])
    several = heard([content, str(tmp_path / "a.wav")])
    assert [len(sound) for sound in several] == [1600, 1600]


def test_a_part_of_a_file_on_a_server_is_read_in_ranges() -> None:
    from trainpipes.filesystems.systems import RangedFile

    fetched: list[int] = []

    def counting(file: RangedFile, missing: list[int]) -> None:
        before = len(file._blocks)
        fetch(file, missing)
        fetched.append(len(file._blocks) - before)

    fetch = RangedFile._fetch
    system = fsspec.filesystem("memory")
    cases = [
        ("WAV", "PCM_16", 0.1),
        ("FLAC", "PCM_16", 0.3),
        ("OGG", "VORBIS", 1.0),
        ("MP3", None, 1.0),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RangedFile, "_fetch", counting)
        for format, subtype, share in cases:
            content = encoded(tone(60), 16_000, format, subtype)
            system.pipe_file("/long", content)
            fetched.clear()
            part = heard("memory://long", start=30, duration=2)
            assert np.allclose(part, heard(content)[480_000:512_000], rtol=0, atol=1e-6)
            assert sum(fetched) * 16_384 <= share * len(content) + 16_384, format


def test_start_and_duration_from_columns() -> None:
    content = encoded(tone(1))
    table = pa.table({
        "audio": [content] * 4, "start": [0.0, 0.25, None, 0.75], "duration": [0.5, None, 0.1, 9.0],
    })  # fmt: skip
    rows = [*tp.from_arrow(table).decode_audio(start="start", duration="duration")]
    assert [len(row["audio"]) for row in rows] == [8000, 12_000, 1600, 4000]
    assert np.array_equal(rows[1]["audio"], heard(content)[4000:])
    for start, said in (
        (-1.0, "from 0 on, got -1.0"),
        (1.0, "ends after 1 s, and is to start at 1 s"),
    ):
        with pytest.raises(tp.errors.UnreadableError, match=said):
            list(tp.from_dataset([{"audio": content, "at": start}]).decode_audio(start="at"))
    with pytest.raises(tp.errors.UnreadableError, match="'d' must be a number of seconds above 0"):
        list(tp.from_dataset([{"audio": content, "d": 0.0}]).decode_audio(duration="d"))


def test_a_sound_too_short_for_another_rate_holds_none() -> None:
    row = {"audio": encoded(tone(2 / 44_100, rate=44_100), rate=44_100)}
    assert len(next(iter(tp.from_dataset([row]).decode_audio()))["audio"]) == 2
    resampled = tp.from_dataset([row]).decode_audio(sampling_rate=8000)
    with pytest.raises(tp.errors.UnreadableError, match="so short that it has no samples at 8,000"):
        list(resampled)
    long = {"audio": encoded(tone(1))}
    skipped = tp.from_dataset([row, long, long]).decode_audio(sampling_rate=8000, on_error="skip")
    assert [len(kept["audio"]) for kept in skipped] == [8000, 8000]


def test_crops_are_drawn_by_row_and_epoch() -> None:
    content = encoded(np.linspace(-0.9, 0.9, 16_000).astype(np.float32))
    rows = rows_of(*[content] * 40).decode_audio(duration=tp.random_crop(0.25), start=0.5)
    firsts = [[float(row["audio"][0]) for row in rows] for _ in range(2)]
    assert len({*firsts[0], *firsts[1]}) > 70
    assert min(firsts[0]) >= -0.01
    assert max(firsts[0]) <= 0.46
    shuffled = rows_of(*[content] * 40).sharding_filter(4).shuffle(9, seed=3)
    crops = shuffled.decode_audio(duration=tp.random_crop(0.25), start=0.5)
    assert {row["x"]: float(row["audio"][0]) for row in crops} == dict(enumerate(firsts[0]))
    other = rows_of(*[content] * 40).decode_audio(duration=tp.random_crop(0.25), start=0.5, seed=1)
    assert [float(row["audio"][0]) for row in other] != firsts[0]
    assert len(heard(content, duration=tp.random_crop(5))) == 16_000


def test_a_batch_has_the_draws_of_its_rows() -> None:
    content = encoded(tone(1))
    rows = rows_of(*[content] * 9)
    before = [row["audio"] for row in rows.decode_audio(duration=tp.random_crop(0.2))]
    batches = rows.batch(4).decode_audio(duration=tp.random_crop(0.2))
    after = [row["audio"] for batch in batches for row in batch]
    assert np.array_equal(before, after)


# What cannot be decoded


def damaged() -> dict[str, bytes]:
    wav, flac = encoded(tone(1)), encoded(tone(1), format="FLAC")
    silent = encoded(np.zeros((0, 1), np.float32))
    no_channels = wav[:22] + b"\0\0" + wav[24:]
    nan = encoded(np.full((100, 1), np.nan, np.float32), subtype="FLOAT")
    video = by_ffmpeg(tone(1), 16_000, "mp4", "aac")
    return {
        "empty": b"", "text": b"this is no sound" * 40, "short": wav[:30], "cut off wav": wav[:20_000],
        "cut off flac": flac[: len(flac) // 4], "header only": wav[:44], "no samples": silent,
        "no channels": no_channels, "nan": nan, "cut off mp4": video[: len(video) // 2],
        "zeros": bytes(4000), "playlist": b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n",
        "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    }  # fmt: skip


def test_sound_that_datasets_have_decoded_is_refused() -> None:
    decoded = {"path": None, "array": [0.0, 0.5], "sampling_rate": 8000}
    for name in ("decode_audio", "audio_info"):
        rows = getattr(tp.from_dataset([{"audio": decoded}]), name)(on_error="skip")
        with pytest.raises(tp.errors.SchemaError, match=r"is decoded: .*Audio\(decode=False\)"):
            list(rows)


@pytest.mark.parametrize("name", damaged())
def test_what_cannot_be_decoded_is_an_error_with_its_row(name: str) -> None:
    good = encoded(tone(0.1))
    rows = rows_of(good, damaged()[name], good)
    with pytest.raises(
        tp.errors.UnreadableError, match=r"holds no sound that can be decoded.*row 1"
    ):
        list(rows.decode_audio())
    assert [row["x"] for row in rows.decode_audio(on_error="skip")] == [0, 2]


def test_the_reason_is_said_whole() -> None:
    with pytest.raises(
        tp.errors.UnreadableError, match=r"decoded: it is cut off: it has 19,956 of"
    ):
        heard(damaged()["cut off wav"])
    with pytest.raises(tp.errors.UnreadableError, match=r"decoded: it ends after 1 s, and is to"):
        heard(encoded(tone(1)), start=2)
    with pytest.raises(tp.errors.UnreadableError, match="decoded: Invalid data found"):
        heard(damaged()["text"])


def test_a_batch_has_a_row_less_for_one_that_cannot_be_decoded() -> None:
    good, bad = encoded(tone(0.1)), encoded(tone(0.1))[:60]
    rows = rows_of(good, bad, good, bad, bad, good).batch(2)
    batches = list(rows.decode_audio(on_error="skip").pad_collate())
    assert [batch["x"].tolist() for batch in batches] == [[0], [2], [5]]
    rows = rows_of(good, bad, good, bad, bad, bad).batch(2)
    assert [[r["x"] for r in batch] for batch in rows.decode_audio(on_error="skip")] == [[0], [2]]


def test_missing_files_and_nulls_are_left_out_if_asked(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(encoded(tone(0.1)))
    names = [
        "a.wav",
        "gone.wav",
        None,
        ".",
        "a\0b",
        "UklGR" * 99,
    ]  # the last one is no path, but base64
    rows = tp.from_arrow(pa.table({"audio": names})).decode_audio(folder=tmp_path)
    with pytest.raises(
        tp.errors.UnreadableError, match=r"gone.wav: No such file or directory.*row 1"
    ):
        list(rows)
    quarantine = tp.Quarantine(tmp_path / "bad")
    kept = tp.from_arrow(pa.table({"audio": names})).decode_audio(
        folder=tmp_path, on_error=quarantine
    )
    assert len(list(kept)) == 1
    (listed,) = (tmp_path / "bad").iterdir()
    lines = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [line["row"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[3]["error"].endswith("it is no path")
    assert lines[4]["error"].endswith("it is no path; map() makes bytes of base64")
    with pytest.raises(
        tp.errors.SchemaError, match="bytes of files, or their paths or URLs, got 3"
    ):
        list(tp.from_dataset([{"audio": 3}]).decode_audio())


def test_samples_are_normalized_as_wav2vec2_takes_them() -> None:
    from transformers import Wav2Vec2FeatureExtractor

    samples = 0.3 + 0.1 * tone(0.5)
    content = encoded(samples, subtype="FLOAT")
    wanted = Wav2Vec2FeatureExtractor()(samples[:, 0], sampling_rate=16_000)["input_values"][0]
    assert np.abs(heard(content, normalize=True) - wanted).max() < 1e-4
    both = heard(encoded(tone(0.1, channels=2)), normalize=True, mono=False)
    assert np.abs(both.mean(axis=1)).max() < 1e-5
    assert np.abs(both.std(axis=1) - 1).max() < 1e-3


def test_a_sound_is_shown_as_a_wave_form() -> None:
    loud = np.concatenate([np.zeros(4000), 0.5 * np.ones(4000)]).astype(np.float32)
    text = str(rows_of(encoded(loud)).decode_audio().show(1))
    assert "array float32  [8,000]  0 to 0.5  " + "▁" * 12 + "█" * 12 in text
    assert "▁" not in str(tp.show({"x": np.array([0.0, np.nan, np.inf])}))


def test_silence_and_a_single_sample_are_sounds() -> None:
    assert not heard(encoded(np.zeros((100, 1), np.float32))).any()
    assert heard(encoded(np.ones((1, 1), np.float32)), sampling_rate=48_000).shape == (3,)


def test_a_stream_whose_length_nobody_knew_is_whole() -> None:
    wav = encoded(tone(1))
    unknown = b"\xff\xff\xff\xff"
    assert len(heard(wav[:4] + unknown + wav[8:40] + unknown + wav[44:])) == 16_000


def test_it_pickles_and_is_written_as_yaml() -> None:
    pipe = tp.read_parquet("x").decode_audio(
        "sound", 16_000, duration=tp.random_crop(2), on_error="skip"
    )
    assert pickle.loads(pickle.dumps(pipe)) == pipe
    from trainpipes import config

    assert config.loads(pipe.to_yaml()) == pipe


def test_what_is_missing_is_said() -> None:
    rows = rows_of(encoded(tone(0.1), 8000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainpipes._internal.checks.find_spec", lambda name: None)
        with pytest.raises(tp.errors.MissingExtraError, match=r"pip install soundfile$"):
            rows.decode_audio()
    pipe = rows.decode_audio(sampling_rate=16_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainpipes._internal.checks.find_spec", lambda name: None)
        with pytest.raises(tp.errors.MissingExtraError, match="pip install soxr"):
            list(pipe)


# Whole chains


def test_seconds_filter_bucket_and_balance_before_anything_is_decoded(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(800, 16_000, 120)
    table = pa.table({"audio": [encoded(tone(1)[:n]) for n in lengths.tolist()]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    pipe = (
        tp.read_parquet(tmp_path / "a.parquet")
        .sharding_filter(4)
        .shuffle(50, seed=1)
        .audio_info(sampling_rate=8000)
        .bucket_by_length(max_tokens=40_000, column="audio_samples", buffer_size=60)
        .decode_audio(sampling_rate=8000)
        .pad_collate(mask={"audio": "audio_mask"})
    )
    batches = list(pipe)
    assert sum(len(batch["audio"]) for batch in batches) == 120
    for batch in batches:
        assert batch["audio"].shape == batch["audio_mask"].shape
        assert batch["audio_mask"].sum(1).tolist() == batch["audio_samples"].tolist()
        assert batch["audio"].numel() <= 40_000
    even = tp.read_parquet(tmp_path / "a.parquet").sharding_filter(4).audio_info().batch(4)
    seconds = even.balance(8, cost="audio_seconds").decode_audio().pad_collate()
    assert sum(len(batch["audio"]) for batch in seconds) == 120


def resumed(make: Callable[[], tp.Pipeline], stops: list[int], workers: int) -> list[Any]:
    state, batches = None, []
    for stop in [*stops, 1 << 30]:
        loader = tp.Loader(make(), num_workers=workers)
        if state is not None:
            loader.load_state_dict(json.loads(state))
        for number, batch in enumerate(loader):
            batches.append(batch["audio"].numpy().tobytes())
            if number + 1 == stop:
                break
        state = json.dumps(loader.state_dict())
    return batches


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_has_the_same_crops(tmp_path: Path, workers: int) -> None:
    for n in range(30):
        (tmp_path / f"{n}.wav").write_bytes(encoded(tone(0.5, seed=n)) if n != 7 else b"broken")

    def make() -> tp.Pipeline:
        rows = tp.read_bytes(str(tmp_path / "*.wav")).sharding_filter(4).shuffle(9, seed=1)
        crop = tp.random_crop(0.2)
        return (
            rows.decode_audio("bytes", duration=crop, output_column="audio", on_error="skip")
            .select("audio")
            .batch(4)
            .pad_collate(mask=False)
        )

    whole = [batch["audio"].numpy().tobytes() for batch in make()]
    assert resumed(make, [2, 3], workers) == whole
    assert [batch["audio"].numpy().tobytes() for batch in tp.Loader(make(), num_workers=2)] == whole


@pytest.mark.parametrize("mono", [True, False])
def test_a_choice_of_columns_leaves_arrays_as_they_are(tmp_path: Path, mono: bool) -> None:
    for n in range(4):
        (tmp_path / f"{n}.wav").write_bytes(encoded(tone(0.1 + 0.1 * (n // 2), seed=n)))
    sounds = tp.read_bytes(str(tmp_path / "*.wav")).decode_audio("bytes", mono=mono)
    whole = [row["bytes"] for row in sounds]
    chosen = sounds.drop_columns("path").batch(2).collate()
    for number, batch in enumerate(chosen):
        assert np.array_equal(batch["bytes"].numpy(), np.stack(whole[2 * number : 2 * number + 2]))


# What models take


@pytest.mark.parametrize("num_mels", [80, 128])
def test_log_mel_is_what_whisper_takes(num_mels: int) -> None:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    seconds = (0.012, 0.3, 5.003, 29.995, 30, 31.5)
    sounds = [tone(length, seed=n)[:, 0] for n, length in enumerate(seconds)]
    sounds += [np.zeros(1600, np.float32), np.ones(1, np.float32)]
    rows = tp.from_dataset([{"audio": sound} for sound in sounds])
    wanted = extractor(sounds, sampling_rate=16_000, return_tensors="np")["input_features"]
    padded = [row["input_features"] for row in rows.log_mel(num_mels, pad_seconds=30)]
    assert np.abs(np.stack(padded) - wanted).max() < 1e-4
    for sound in sounds[1:6]:
        options: Any = {"padding": "do_not_pad", "truncation": False, "return_tensors": "np"}
        wanted = extractor([sound], sampling_rate=16_000, **options)["input_features"][0]
        (row,) = tp.from_dataset([{"audio": sound}]).log_mel(num_mels, time_first=True)
        assert np.abs(row["input_features"].T - wanted).max() < 1e-4


def test_log_mel_is_of_the_rate_that_was_decoded() -> None:
    rows = tp.from_dataset([{"audio": encoded(tone(0.1, 8000), 8000)}])
    decoded = rows.decode_audio(sampling_rate=8000)
    for chain in (decoded, decoded.batch(1)):
        with pytest.raises(
            tp.ConfigError, match=r"be that of decode_audio.. before it, 8,000, got"
        ):
            chain.log_mel()
    assert next(iter(decoded.log_mel(sampling_rate=8000)))["input_features"].shape == (80, 5)
    resampled = decoded.map(lambda row: {"audio": row["audio"].repeat(2)})
    assert next(iter(resampled.log_mel()))["input_features"].shape == (80, 10)
    decoded.rename({"audio": "sound"}).log_mel(column="sound")  # nothing is known of it


def test_log_mel_pads_to_a_frame_at_least() -> None:
    rows = tp.from_dataset([{"audio": tone(0.1)[:, 0]}])
    assert next(iter(rows.log_mel(pad_seconds=0.01)))["input_features"].shape == (80, 1)
    with pytest.raises(tp.ConfigError, match=r"pad_seconds\) must be .* 0.01 seconds, got 0.0099"):
        rows.log_mel(pad_seconds=0.0099)


def test_log_mel_of_columns_of_arrow_and_of_batches() -> None:
    sounds = [tone(0.1 + n / 50, seed=n)[:, 0] for n in range(7)]
    expected = [
        row["input_features"] for row in tp.from_dataset([{"audio": s} for s in sounds]).log_mel()
    ]
    lists = pa.array([s.tolist() for s in sounds], pa.list_(pa.float32()))
    rows = tp.from_arrow(pa.table({"x": range(7), "audio": lists})).log_mel()
    found = {row["x"]: row["input_features"] for row in rows}
    assert all(np.array_equal(found[n], expected[n]) for n in range(7))
    batched = tp.from_dataset([{"audio": s} for s in sounds]).batch(3).log_mel(time_first=True)
    batches = list(batched.pad_collate(lengths={"input_features": "frames"}))
    assert [batch["input_features"].shape for batch in batches] == [
        (3, 14, 80),
        (3, 20, 80),
        (1, 22, 80),
    ]
    assert [n for batch in batches for n in batch["frames"].tolist()] == [
        len(e.T) for e in expected
    ]
    assert np.array_equal(batches[0]["input_features"][0, :10], expected[0].T)
    alike = tp.from_dataset([{"audio": sounds[0]}] * 2).log_mel(time_first=True).batch(2)
    (batch,) = alike.pad_collate(lengths={"input_features": "n"}, mask={"input_features": "mask"})
    assert (batch["n"].tolist(), batch["mask"].shape) == ([10, 10], (2, 10))
    masked = alike.mask_spans(time_first=True).pad_collate(max_length=16)
    assert next(iter(masked))["input_features"].shape == (2, 16, 80)
    own = tp.from_dataset([{"x": np.ones((9, 4), np.float32)}] * 2).batch(2)
    (batch,) = own.mask_spans(column="x", time_first=True).pad_collate(max_length=16)
    assert batch["x"].shape == (2, 16, 4)
    for bad, said in (
        (np.zeros(150, np.float32), "201 samples or more, got 150"),
        (b"x", "decode_audio"),
    ):
        with pytest.raises(tp.errors.DataError, match=said):
            list(tp.from_dataset([{"audio": bad}]).log_mel())


@pytest.mark.parametrize(
    "make",
    [lambda s: tp.from_dataset([{"audio": s}]), lambda s: tp.from_arrow(pa.table({"audio": [s]}))],
)
def test_log_mel_takes_no_integers_which_are_not_from_minus_1_to_1(make: Any) -> None:
    sound = (tone(0.1)[:, 0] * 32_767).astype(np.int16)
    with pytest.raises(tp.errors.SchemaError, match=r"floats from -1 to 1, got int16: divide them"):
        list(make(sound).log_mel())


def test_log_mel_leaves_the_other_columns_as_they_are() -> None:
    matrix = np.ones((2, 3), np.float32)
    rows = tp.from_dataset([{"audio": np.zeros(500, np.float32), "matrix": matrix, "x": 1.0}] * 4)
    for row in rows.filter(pc.field("x") > 0).log_mel():
        assert isinstance(row["matrix"], np.ndarray)
        assert np.array_equal(row["matrix"], matrix)
    lists = pa.array([[0.0] * 500], pa.list_(pa.float32()))
    said = pa.array(['{"speaker": 1}'], pa.json_())
    (row,) = tp.from_arrow(pa.table({"audio": lists, "said": said})).log_mel()
    assert row["said"] == {"speaker": 1}


def test_spans_are_masked_by_row_and_epoch() -> None:
    ones = np.ones((20, 100), np.float32)
    rows = tp.from_dataset([{"input_features": ones, "x": n} for n in range(50)])
    pipe = rows.mask_spans(1, 30, 1, 8, time_share=0.2)
    epochs = [[row["input_features"] for row in pipe] for _ in range(2)]
    assert ones.all()
    assert not np.array_equal(epochs[0], epochs[1])
    for masked in epochs[0]:
        times, bands = (masked == 0).all(axis=0), (masked == 0).all(axis=1)
        assert np.array_equal(masked == 0, times[None] | bands[:, None])
        assert times.sum() <= 20
        assert bands.sum() <= 8
        assert np.abs(np.diff(times.astype(int))).sum() <= 2
    widths = [int((masked == 0).all(axis=0).sum()) for masked in epochs[0]]
    assert (min(widths), max(widths)) == (0, 20)
    shuffled = rows.sharding_filter(4).shuffle(9).batch(4).mask_spans(1, 30, 1, 8, time_share=0.2)
    found = {row["x"]: row["input_features"] for batch in shuffled for row in batch}
    assert all(np.array_equal(found[n], epochs[0][n]) for n in range(50))
    turned = tp.from_dataset([{"input_features": ones.T}] * 50).mask_spans(1, 30, 1, 8, time_share=0.2,
        time_first=True)  # fmt: skip
    assert np.array_equal([row["input_features"].T for row in turned], epochs[0])
    with pytest.raises(tp.errors.DataError, match=r"put log_mel\(\) before"):
        list(tp.from_dataset([{"input_features": [1]}]).mask_spans())


@pytest.mark.parametrize("time_first", [False, True])
def test_masks_of_time_lie_in_the_sound_and_not_in_its_padding(time_first: bool) -> None:
    sounds = [np.random.default_rng(n).standard_normal(800 * n).astype("f4") for n in range(1, 61)]
    rows = tp.from_dataset([{"audio": sound} for sound in sounds])
    mels = rows.log_mel(8, pad_seconds=2, frames_column="frames", time_first=time_first)
    found = list(mels.mask_spans(1, 30, 0, 0, value=-9, frames_column="frames", time_share=0.5))
    for sound, row in zip(sounds, found, strict=True):
        assert row["frames"] == min(200, len(sound) // 160)
        masked = np.flatnonzero((row["input_features"] == -9).all(1 if time_first else 0))
        assert len(masked) <= row["frames"] / 2
        assert masked.max(initial=0) < row["frames"]
    assert sum(bool((row["input_features"] == -9).any()) for row in found) > 45
    (whole,) = tp.from_dataset([{"audio": sounds[0]}]).log_mel(frames_column="n")
    assert whole["n"] == whole["input_features"].shape[1] == 5
    with pytest.raises(
        tp.SchemaError, match=r"holds numbers of frames, got None: log_mel\(frames_col"
    ):
        list(mels.map(lambda row: {**row, "frames": None}).mask_spans(frames_column="frames"))
    with pytest.raises(tp.SchemaError, match="'x'"):
        list(rows.map(lambda row: {**row, "x": 1}).log_mel(frames_column="x"))


MUTATED = """
import faulthandler, io, sys
import numpy as np
sys.path[:0] = {paths!r}
faulthandler.enable()
from sound_fixtures import by_ffmpeg, encoded, tone
from trainpipes.media.sound import Clip, NoSound, header_of, samples_of
rng = np.random.default_rng(5)
kinds = [("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", None), ("WAV", "IMA_ADPCM"),
         ("AIFF", "PCM_16"), ("CAF", "ALAC_16")]
files = [encoded(tone(0.3), 16_000, *kind) for kind in kinds]
files += [by_ffmpeg(tone(0.3, 48_000), 48_000, *kind) for kind in (
    ("mp4", "aac"), ("webm", "libopus"), ("mpegts", "aac"))]
decoded = 0
for number in range({count}):
    content = bytearray(files[number % len(files)])
    for _ in range(rng.integers(1, 9)):
        content[rng.integers(len(content) if number % 3 else 200)] = rng.integers(256)
    if number % 5 == 0:
        del content[rng.integers(len(content)) :]
    for work in (header_of, samples_of, lambda file: samples_of(file, Clip(0.1, 0.1))):
        try:
            work(io.BytesIO(content))
            decoded += 1
        except NoSound:
            pass
print(decoded)
"""


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_files_give_sound_or_a_reason(count: int) -> None:
    program = MUTATED.format(paths=sys.path, count=count)
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=280)
    assert child.returncode == 0, child.stderr.decode()[-3000:]
    assert count < int(child.stdout) < 3 * count


def test_sound_in_matroska_may_begin_late_and_end_before_the_video() -> None:
    """Where the header says how long all lasts, counted from 0."""
    shorter = video(100, "matroska", sound=1)  # of 4 s
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        stream = out.add_stream("pcm_s16le", rate=16_000, layout="mono")
        part = av.AudioFrame.from_ndarray(np.full((1, 16_000), 99, np.int16), "s16", "mono")
        part.sample_rate, part.pts = 16_000, 40_000
        out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    for content in (shorter, file.getvalue()):
        assert heard(content).size == pytest.approx(16_000, abs=1100)
        (row,) = tp.from_dataset([{"audio": content}]).audio_info()
        assert row["audio_seconds"] == pytest.approx(1, abs=0.1)
        crops = tp.from_dataset([{"audio": content}] * 5).decode_audio(duration=tp.random_crop(0.5))
        assert all(7000 < row["audio"].size <= 8000 for row in crops)


def test_flac_whose_length_nobody_knew_is_whole() -> None:
    flac = encoded(tone(3), format="FLAC")
    streamed = flac[:21] + bytes([flac[21] & 0xF0, 0, 0, 0, 0]) + flac[26:]
    assert np.array_equal(heard(streamed), heard(flac))
    clip: dict[str, Any] = {"start": 1.3, "duration": 0.7}
    assert np.array_equal(heard(streamed, **clip), heard(flac, **clip))
    rows = tp.from_dataset([{"audio": streamed}] * 5)
    assert {row["audio"].size for row in rows.decode_audio(duration=tp.random_crop(1))} == {16_000}
    with pytest.raises(tp.errors.UnreadableError, match="does not say how long it is"):
        list(rows.audio_info())


def test_a_video_that_lasts_longer_does_not_make_its_sound_cut_off() -> None:
    untagged = video(100, "matroska", sound=1).replace(b"DURATION", b"DURATIOM")
    for content in (video(100, "flv", sound=1), untagged):
        assert heard(content).size == pytest.approx(16_000, abs=2100)
        crops = tp.from_dataset([{"audio": content}] * 9).decode_audio(duration=tp.random_crop(0.5))
        assert all(7000 < row["audio"].size <= 8000 for row in crops)


@pytest.mark.parametrize("loud_first", [False, True])
def test_the_length_that_ffmpeg_guesses_of_aac_cuts_nothing(loud_first: bool) -> None:
    loud = 0.3 * np.random.default_rng(0).standard_normal((320_000, 1)).astype(np.float32)
    parts = [loud, np.zeros_like(loud)]
    content = by_ffmpeg(np.concatenate(parts if loud_first else parts[::-1]), 16_000, "adts", "aac")
    assert heard(content).size == pytest.approx(640_000, abs=4096)
    assert heard(content, start=38, duration=1).size == 16_000
    with pytest.raises(tp.errors.UnreadableError, match="does not say how long it is"):
        list(tp.from_dataset([{"audio": content}]).audio_info())


# On a server


def test_a_clip_is_fetched_from_s3_by_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s3_store import s3_store
    from trainpipes.filesystems.retry import Requests

    fetched: list[int] = []
    ranges = Requests.ranges

    def counted(self: Requests, system: Any, path: str, wanted: Any, *about: Any) -> Any:
        fetched.extend(stop - start for start, stop in wanted)
        return ranges(self, system, path, wanted, *about)

    monkeypatch.setattr(Requests, "ranges", counted)
    with s3_store("test-sound") as options:
        system = fsspec.filesystem("s3", **options)
        for format, content in (
            ("WAV", encoded(tone(60))),
            ("FLAC", encoded(tone(60), format="FLAC")),
            ("M4A", by_ffmpeg(tone(60, 48_000), 48_000, "mp4", "aac")),
        ):
            system.pipe_file("test-sound/long", content)
            clip: dict[str, Any] = {"start": 29.3, "duration": 2}
            fetched.clear()
            part = heard("s3://test-sound/long", storage_options=options, **clip)
            assert np.array_equal(part, heard(content, **clip))
            assert 0 < sum(fetched) <= 0.3 * len(content), format
            rows = tp.from_dataset([{"audio": "s3://test-sound/long"}])
            fetched.clear()
            (row,) = rows.audio_info(storage_options=options)
            assert abs(row["audio_seconds"] - 60) < 0.1
            assert sum(fetched) <= 0.15 * len(content), format
        gone = tp.from_dataset([{"audio": "s3://test-sound/gone"}])
        aside = tp.Quarantine(tmp_path, max_share=1)
        assert not list(gone.decode_audio(storage_options=options, on_error=aside))
        with pytest.raises(tp.errors.UnreadableError, match="test-sound/gone"):
            list(gone.decode_audio(storage_options=options))
    retry = tp.Retry(max_attempts=1, deadline=1)
    with pytest.raises(tp.errors.UnreachableError, match=r"by decode_audio\(\.\.\., retry="):
        list(gone.decode_audio(storage_options=options, retry=retry, on_error="skip"))


@pytest.mark.parametrize("container", ["adts", "mpegts", "flac"])
def test_a_file_of_this_machine_gives_what_its_bytes_give(container: str, tmp_path: Path) -> None:
    samples = tone(2, 44_100, 2)
    content = encoded(samples, 44_100, "FLAC")
    if container != "flac":  # which libsndfile refuses by what it reads
        content = by_ffmpeg(samples, 44_100, container, "aac")
    (tmp_path / "sound").write_bytes(content)
    rows = tp.from_dataset([{"audio": content}, {"audio": str(tmp_path / "sound")}])
    for options in ({}, {"start": 0.5, "duration": 0.25}):
        of_bytes, of_file = (row["audio"] for row in rows.decode_audio(**options))
        assert len(of_bytes)
        assert np.array_equal(of_bytes, of_file)


@pytest.mark.parametrize(
    "option",
    [
        {"mask": {"audio": "audio_mask"}},
        {"mask": {"audio": "attention_mask"}},
        {"lengths": {"audio": "audio_lengths"}},
    ],
)
def test_stats_tell_seconds_and_padding(option: dict[str, Any]) -> None:
    contents = [encoded(tone(n / 2, 8_000), 8_000) for n in range(1, 9)]
    sounds = rows_of(*contents).decode_audio(sampling_rate=16_000).batch(4)
    padding = sounds.pad_collate(**option).stats().padding
    assert padding is not None
    assert (padding.cells, padding.share, padding.seconds) == (4 * 16_000 * 6, 0.25, 18.0)
    assert str(padding) == "25.00% of 384,000 cells; 18.0 s of sound"
