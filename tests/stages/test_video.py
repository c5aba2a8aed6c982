"""Videos: which frames come, equal to those of a full decode; what is read; and what cannot be decoded."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import subprocess
import sys
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import av
import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch

import trainpipes as tp
from resuming import goes_on_exactly
from trainpipes import config
from video_fixtures import pictures, video

VIDEO = video()


def decoded(content: Any, **options: Any) -> Any:
    (row,) = tp.from_dataset([{"video": content}]).decode_video(**options)
    return row["video"]


def rows_of(*contents: Any) -> tp.Pipeline:
    return tp.from_dataset([{"video": content, "x": x} for x, content in enumerate(contents)])


def in_order(content: bytes) -> tuple[list[Fraction], list[Any]]:
    """Of all frames, decoded from the first to the last: seconds and pixels."""
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
        begin, tick = stream.start_time or 0, Fraction(stream.time_base or 0)
        pixels = [f.reformat(format="rgb24", interpolation="BICUBIC").to_ndarray() for f in frames]
    return [(frame.pts - begin) * tick if frame.pts is not None else 0 for frame in frames], pixels


def digests(frames: Any) -> list[str]:
    return [hashlib.sha256(np.ascontiguousarray(frame)).hexdigest() for frame in frames]


#: Containers and codecs, with B-frames where a codec has them; of some the header does not say the length.
KINDS: dict[str, dict[str, Any]] = {
    "mp4": {},
    "mp4, mpeg4": {"codec": "mpeg4", "options": {"bf": "2"}},
    "mp4, fragments": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "mp4, hevc": {"codec": "libx265"},
    "mov, sound": {"container": "mov", "sound": 3},
    "matroska, open groups": {
        "container": "matroska", "options": {"x264-params": "open-gop=1:keyint=12:bframes=3"},
    },
    "matroska, sound": {"container": "matroska", "sound": 3},
    "webm, vp8": {"container": "webm", "codec": "libvpx"},
    "webm, vp9": {"container": "webm", "codec": "libvpx-vp9"},
    "mpegts": {"container": "mpegts"},
    "mpegts, mpeg2": {"container": "mpegts", "codec": "mpeg2video", "options": {"bf": "2"}},
    "avi": {"container": "avi", "codec": "mpeg4"},
    "flv": {"container": "flv"},
    "gif": {"container": "gif", "codec": "gif", "pixels": "rgb8"},
    "lossless": {"container": "matroska", "codec": "ffv1"},
    "variable rate": {"times": [40 * n + n * 7919 % 31 for n in range(50)]},
    "odd size": {"size": (49, 67), "pixels": "yuv444p"},
    "full range": {"container": "avi", "codec": "mjpeg", "pixels": "yuvj420p"},
    "one frame": {"frames": 1},
}  # fmt: skip


#: So that key frames come as often as they are asked for, and no more.
ONE_KEY = {
    "mp4": {"x264-params": "keyint=40:min-keyint=40:scenecut=0:bframes=3"},
    "flv": {"x264-params": "keyint=40:min-keyint=40:scenecut=0:bframes=3"},
    "mp4, hevc": {"x265-params": "keyint=40:min-keyint=40:scenecut=0:bframes=3:log-level=none"},
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_those_of_a_full_decode(kind: str) -> None:
    content = video(**KINDS[kind])
    seconds, frames = in_order(content)
    expected = digests(frames)
    assert digests(decoded(content)) == expected
    last = len(frames) - 1
    numbers = [last, 0, last // 2, last // 2, min(13, last)]
    assert digests(decoded(content, frames=numbers)) == [expected[n] for n in numbers]
    clips: list[tuple[float, float | None]] = [(0.0, None), (0.5, 0.9), (1.3, None)]
    for start, duration in clips[: 1 if kind == "one frame" else 3]:
        for options in (
            {"num_frames": 3},
            {"num_frames": 61},
            {"fps": 2.5},
            {"fps": 25},
            {"fps": 60},
        ):
            clip = {"start": start, "duration": duration, **options}
            (row,) = rows_of(content).decode_video(**clip, times_column="times")
            places = [seconds.index(s) for s in map(nearest(seconds), row["times"])]
            assert digests(row["video"]) == [expected[n] for n in places], clip
            begin, end = Fraction(str(start)), length_of(content)
            end = min(end, begin + Fraction(str(duration))) if duration else end
            wanted = middles(begin, end, **options)
            # Of each middle of a part, the last frame before it.
            found = [max([n for n, s in enumerate(seconds) if s < t], default=0) for t in wanted]
            assert places == found, clip


def nearest(seconds: list[Fraction]) -> Any:
    return lambda time: min(seconds, key=lambda second: abs(second - time))


def length_of(content: bytes) -> Fraction:
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        if stream.duration is not None:
            return stream.duration * Fraction(stream.time_base or 0)
        tag = stream.metadata.get("DURATION")
        if tag is not None:
            return Fraction(tag.rpartition(":")[2])
        return Fraction(container.duration or 0, 1_000_000)


def middles(
    start: Fraction, end: Fraction, num_frames: int | None = None, fps: float | None = None
) -> list[Fraction]:
    step = (end - start) / num_frames if num_frames else 1 / Fraction(fps or 1)
    count = num_frames or max(1, int((end - start) / step + Fraction(1, 2)))
    return [start + step * (n + Fraction(1, 2)) for n in range(count)]


def as_of_mkvmerge(content: bytes) -> bytes:
    """Matroska with the tags of mkvmerge, whose length counts from the first frame."""
    file = io.BytesIO()
    with av.open(io.BytesIO(content)) as source, av.open(file, "w", format="matroska") as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        stream.metadata["_STATISTICS_TAGS"] = "DURATION"
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                packet.stream = stream
                out.mux(packet)
    assert b"00:00:03.000000000" in file.getvalue()
    return file.getvalue().replace(b"00:00:03.000000000", b"00:00:02.000000000")


@pytest.mark.parametrize("container", ["matroska", "webm", "mp4", "mpegts"])
def test_a_video_may_begin_after_0(container: str) -> None:
    codec = "libvpx" if container == "webm" else "libx264"
    content = video(50, container, codec, times=[40 * n + 1000 for n in range(50)])
    contents = [content]
    if container == "matroska":  # also without FFmpeg's tag, and with mkvmerge's
        contents += [content.replace(b"DURATION", b"DURATIOM"), as_of_mkvmerge(content)]
    for each in contents:
        (row,) = rows_of(each).decode_video(num_frames=5, times_column="times")
        assert row["times"].tolist() == pytest.approx([0.16, 0.56, 0.96, 1.36, 1.76], abs=0.03)
        frames = in_order(content)[1]
        assert digests(row["video"]) == digests([frames[n] for n in (4, 14, 24, 34, 44)])


@pytest.mark.parametrize("kind", ["mp4", "mp4, hevc", "flv", "mpegts, mpeg2"])
def test_a_wanted_frame_may_lie_just_before_a_key_frame(kind: str) -> None:
    """Where the key frame is in the index by the time at which it is decoded, before the frame."""
    content = video(60, **{**KINDS[kind], "gop": 40, "options": ONE_KEY.get(kind, {"bf": "2"})})
    seconds, frames = in_order(content)
    for n in range(34, 45):
        wanted = Fraction(n, 25) + Fraction(1, 50)
        duration = float(wanted * 4 / 3)  # of which two frames are those at a fourth and at three
        (row,) = rows_of(content).decode_video(
            num_frames=2, duration=duration, times_column="times"
        )
        places = [sum(s < t for s in seconds) - 1 for t in (wanted / 3, wanted)]
        assert row["times"].tolist() == pytest.approx([float(seconds[p]) for p in places]), n
        assert digests(row["video"]) == digests([frames[p] for p in places]), n


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", ["mp4", "variable rate", "mpegts", "odd size"])
@pytest.mark.parametrize("fps", [2, 12.5, 25, 60])
def test_a_rate_is_that_of_ffmpegs_filter(kind: str, fps: float) -> None:
    content = video(**KINDS[kind])
    expected = []
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        graph = av.filter.Graph()
        graph.link_nodes(
            graph.add_buffer(template=stream),
            graph.add("fps", f"fps={fps}"),
            graph.add("buffersink"),
        ).configure()
        for frame in [*container.decode(stream), None]:
            if frame is not None and frame.pts is not None:
                frame.pts -= stream.start_time or 0
            graph.push(frame)
            while True:
                try:
                    made: Any = graph.pull()
                except (av.BlockingIOError, av.EOFError):
                    break
                expected.append(made.reformat(format="rgb24", interpolation="BICUBIC").to_ndarray())
    assert digests(decoded(content, fps=fps)) == digests(expected)


@pytest.mark.parametrize(("codec", "container"), [("libx264", "h264"), ("libx264", "avi")])
def test_frames_without_times_count_at_their_rate(codec: str, container: str) -> None:
    content = video(50, container, codec)
    expected = digests(in_order(content)[1])
    assert digests(decoded(content)) == expected
    assert digests(decoded(content, num_frames=5)) == [expected[n] for n in (4, 14, 24, 34, 44)]
    assert digests(decoded(content, start=1, fps=5)) == [expected[n] for n in (27, 32, 37, 42, 47)]


@pytest.mark.parametrize("kind", ["mp4", "avi", "variable rate"])
def test_a_clip_between_two_frames_has_the_one_that_is_shown(kind: str) -> None:
    content = video(**KINDS[kind])
    times, frames = in_order(content)
    for begin in (float(times[7]) + 0.005, float(times[-1]) + 0.005):
        (found,) = decoded(content, start=begin, duration=0.001)
        last = max(n for n, time in enumerate(times) if time < begin)
        assert digests([found]) == digests([frames[last]])


@pytest.mark.parametrize("rotation", [90, 180, -90])
def test_videos_come_upright(rotation: int) -> None:
    content = video(12, rotation=rotation)
    turned = np.rot90(np.stack(in_order(content)[1]), rotation // 90, axes=(1, 2))
    assert np.array_equal(decoded(content), turned)
    assert (
        decoded(content, size=24).shape == (12, 32, 24, 3) if rotation != 180 else (12, 24, 32, 3)
    )
    assert decoded(content, size=(20, 30), num_frames=2).shape == (2, 20, 30, 3)


def test_sizes_and_times() -> None:
    (row,) = rows_of(VIDEO).decode_video(
        num_frames=4, size=24, times_column="times", output_column="clip"
    )
    assert list(row) == ["clip", "x", "times"]
    assert (row["clip"].shape, row["clip"].dtype) == ((4, 24, 32, 3), np.uint8)
    assert row["clip"].flags.c_contiguous
    assert row["clip"].flags.writeable
    assert (row["times"].dtype, row["times"].tolist()) == (np.float64, [0.24, 0.72, 1.24, 1.72])
    small = decoded(VIDEO, size=(24, 32), frames=[7])[0].astype(int)
    whole = decoded(VIDEO, frames=[7])[0].reshape(24, 2, 32, 2, 3).mean((1, 3))
    assert np.abs(small - whole).mean() < 12
    assert decoded([VIDEO, VIDEO], num_frames=2, times_column="t")[1].shape == (2, 48, 64, 3)


def test_frames_of_another_size_become_as_large_as_the_first() -> None:
    big = [np.full((64, 96, 3), n, np.uint8) for n in range(12)]
    content = video(12, "mpegts") + video(big, "mpegts")
    assert decoded(content, fps=25, duration=9).shape[1:] == (48, 64, 3)


def test_bytes_paths_urls_and_structs(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(VIDEO)
    fsspec.filesystem("memory").pipe_file("/videos/a.mp4", VIDEO)
    expected = digests(decoded(VIDEO, num_frames=3))
    alike: list[tuple[Any, dict[str, Any]]] = [
        (bytearray(VIDEO), {}), (memoryview(VIDEO), {}), (str(tmp_path / "a.mp4"), {}),
        (tmp_path / "a.mp4", {}), ("a.mp4", {"folder": tmp_path}), ("memory://videos/a.mp4", {}),
        ({"bytes": VIDEO, "path": "gone.mp4"}, {}), ({"bytes": None, "path": str(tmp_path / "a.mp4")}, {}),
    ]  # fmt: skip
    for value, options in alike:
        assert digests(decoded(value, num_frames=3, **options)) == expected


def test_only_what_frames_need_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainpipes.media.video import Track

    sent: list[int] = []
    decode = Track._decode

    def counting(track: Track, wanted: int | None) -> None:
        sent.append(len(track._pending) > 0)
        decode(track, wanted)

    monkeypatch.setattr(Track, "_decode", counting)
    content = video(1000, gop=20, size=(16, 32))
    for options, most in (({"num_frames": 4}, 100), ({"start": 30, "duration": 0.2}, 40)):
        sent.clear()
        decoded(content, **options)
        assert 0 < sum(sent) < most, options


def test_a_clip_of_a_file_on_a_server_is_read_in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainpipes.filesystems.systems import RangedFile

    fetched: list[int] = []
    fetch = RangedFile._fetch

    def counting(file: RangedFile, missing: list[int]) -> None:
        before = len(file._blocks)
        fetch(file, missing)
        fetched.append(len(file._blocks) - before)

    monkeypatch.setattr(RangedFile, "_fetch", counting)
    clip: dict[str, Any] = {"start": 30.0, "duration": 2.0, "num_frames": 8}
    large: dict[str, Any] = {
        "rate": 10,
        "gop": 10,
        "options": {"b": "2000000"},
        "sound": 60,
    }
    shown = pictures(600, 96, 128)
    system = fsspec.filesystem("memory")
    for container in ("mp4", "matroska"):
        content = video(shown, container, "mpeg4", **large)
        system.pipe_file(f"/videos/{container}", content)
        fetched.clear()
        found = decoded(f"memory://videos/{container}", **clip)
        assert digests(found) == digests(decoded(content, **clip))
        assert 0 < sum(fetched) * 16_384 < 0.25 * len(content), container


def test_crops_are_drawn_by_row_and_epoch() -> None:
    def times(rows: tp.Pipeline) -> dict[int, list[float]]:
        return {row["x"]: row["times"].tolist() for row in rows}

    options: dict[str, Any] = {
        "duration": tp.random_crop(0.4),
        "num_frames": 2,
        "times_column": "times",
    }
    rows = rows_of(*[VIDEO] * 12).decode_video(**options)
    first, second = times(rows), times(rows)
    assert len({*map(tuple, [*first.values(), *second.values()])}) > 14
    assert max(max(t) for t in first.values()) < 1.96
    shuffled = rows_of(*[VIDEO] * 12).sharding_filter(4).shuffle(5, seed=3).decode_video(**options)
    assert times(shuffled) == first
    batched = rows_of(*[VIDEO] * 12).batch(4).decode_video(**options)
    assert {row["x"]: row["times"].tolist() for batch in batched for row in batch} == first
    assert times(rows_of(*[VIDEO] * 12).decode_video(**options, seed=1)) != first
    columns = rows_of(*[VIDEO] * 2).map(lambda row: {**row, "at": row["x"] / 2, "long": 0.4})
    (_, row) = columns.decode_video(start="at", duration="long", num_frames=2, times_column="times")
    assert row["times"].tolist() == [0.56, 0.76]


def test_stages_on_images_treat_all_frames_of_a_clip_alike() -> None:
    clip = np.stack(pictures(4, 20, 30))
    rows = tp.from_dataset([{"video": clip, "n": n} for n in range(20)])
    drawn = rows.random_crop(9, column="video").flip(column="video")
    for row in drawn:
        assert row["video"].shape == (4, 3, 9, 9)
        places = set()
        for frame, picture in zip(row["video"], clip.transpose(0, 3, 1, 2), strict=True):
            windows = np.lib.stride_tricks.sliding_window_view(picture, (9, 9), (1, 2))
            same = [
                (top, left, mirrored)
                for mirrored in (False, True)
                for top in range(12) for left in range(22)
                if (windows[:, top, left] == (frame[:, :, ::-1] if mirrored else frame)).all()
            ]  # fmt: skip
            places.add(tuple(same))
        assert len(places) == 1
        assert places.pop()
    noisy = rows.image_transform(
        lambda x: x + torch.randint(0, 9, (1,), dtype=torch.uint8), column="video"
    )
    for row in noisy:
        assert row["video"].shape == (4, 3, 20, 30)
        assert (
            len({int(d) for d in (row["video"].numpy() - clip.transpose(0, 3, 1, 2)).ravel()}) == 1
        )


def test_clips_make_batches(tmp_path: Path) -> None:
    rows = rows_of(VIDEO, video(30, seed=1), video(40, seed=2), VIDEO)
    (batch,) = rows.decode_video(num_frames=5, times_column="times").batch(4).collate()
    assert (batch["video"].shape, batch["video"].dtype) == ((4, 5, 48, 64, 3), torch.uint8)
    assert batch["times"].shape == (4, 5)
    with pytest.raises(
        tp.DataError, match=r"only equal shapes can be stacked: crop or resize .* num_frames="
    ):
        list(rows.decode_video(fps=5).batch(4).collate())
    (ragged,) = rows.decode_video(fps=5).batch(4).pad_collate(dtype=torch.uint8, mask=False)
    assert (ragged["video"].shape, ragged["video"].dtype) == ((4, 10, 48, 64, 3), torch.uint8)


# What cannot be decoded


def test_an_error_names_the_file_of_a_path(tmp_path: Path) -> None:
    (tmp_path / "cut.mp4").write_bytes(VIDEO[: len(VIDEO) // 2])
    rows = tp.from_dataset(
        [{"video": str(tmp_path / "cut.mp4"), "audio": str(tmp_path / "cut.mp4")}]
    )
    for pipe in (rows.decode_video(), rows.decode_audio(), rows.audio_info()):
        with pytest.raises(tp.errors.UnreadableError, match=r"cut\.mp4: [a-zI]"):
            list(pipe)


def damaged() -> dict[str, bytes]:
    matroska = video(60, "matroska")
    lost = bytearray(VIDEO)
    lost[len(lost) // 3 : len(lost) // 2] = bytes(len(lost) // 2 - len(lost) // 3)
    with_sound = io.BytesIO()
    with av.open(with_sound, "w", format="mp4") as out:
        stream: Any = out.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate = 16_000
        out.mux([*stream.encode(frame), *stream.encode(None)])
    return {
        "empty": b"", "text": b"this is no video\n" * 40, "short": VIDEO[:30],
        "cut off": VIDEO[: len(VIDEO) // 2],
        "cut off, matroska": matroska[: len(matroska) // 2], "zeros within": bytes(lost),
        "sound alone": with_sound.getvalue(), "zeros": bytes(4000),
        "playlist": b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n",
        "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    }  # fmt: skip


@pytest.mark.parametrize("name", damaged())
def test_what_cannot_be_decoded_is_an_error_with_its_row(name: str) -> None:
    rows = rows_of(VIDEO, damaged()[name], VIDEO)
    said = r"column 'video' holds no video that can be decoded.*row 1"
    with pytest.raises(tp.errors.UnreadableError, match=said):
        list(rows.decode_video(num_frames=30))
    assert [row["x"] for row in rows.decode_video(num_frames=30, on_error="skip")] == [0, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"frames": [0, 50]}, "has 50 frames, and number 50 is wanted"),
        ({"start": 2.5}, "ends after 2 s, and is to start at 2.5 s"),
        ({"fps": 1e12}, "frames would be decoded: lower fps"),
        ({"size": 50_000}, "are more than 2 GiB: decode fewer, or give a size"),
    ],
)
def test_what_a_video_does_not_have_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(tp.errors.UnreadableError, match=said):
        decoded(VIDEO, **options)


def test_sound_that_is_longer_does_not_make_a_video_cut_off() -> None:
    content = video(50, "flv", sound=5)
    (row,) = rows_of(content).decode_video(num_frames=4, times_column="times")
    assert row["times"].max() < 2
    assert len({*digests(row["video"])}) == 4


def test_files_that_are_left_out_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(VIDEO)
    names = ["a.mp4", "gone.mp4", None, "."]
    rows = tp.from_arrow(pa.table({"video": names}))
    with pytest.raises(
        tp.errors.UnreadableError, match=r"gone.mp4: No such file or directory.*row 1"
    ):
        list(rows.decode_video(folder=tmp_path))
    kept = rows.decode_video(
        folder=tmp_path, on_error=tp.Quarantine(tmp_path / "bad"), num_frames=1
    )
    assert len(list(kept)) == 1
    (listed,) = (tmp_path / "bad").iterdir()
    assert [json.loads(line)["row"] for line in listed.read_text().splitlines()] == [1, 2, 3]


# Whole chains


def files(folder: Path) -> tp.Pipeline:
    for n in range(14):
        content = video(20 + n, codec="mpeg4", size=(16, 24), seed=n) if n != 5 else b"broken"
        (folder / f"{n:02}.mp4").write_bytes(content)
    rows = (
        tp.read_bytes(str(folder / "*.mp4"))
        .drop_columns("path")
        .sharding_filter(4)
        .shuffle(5, seed=1)
    )
    clips = rows.decode_video(
        "bytes", output_column="video", fps=10, duration=tp.random_crop(0.4), on_error="skip"
    )
    return clips.flip(column="video").batch(3).collate()


def test_a_resume_has_the_same_clips(tmp_path: Path) -> None:
    pipe = files(tmp_path)
    goes_on_exactly(lambda: tp.Pipeline(pipe.stages))
    goes_on_exactly(lambda: tp.Loader(tp.Pipeline(pipe.stages), num_workers=2), epochs=1)


def test_ranks_and_workers_share_the_same_clips(tmp_path: Path) -> None:
    pipe = files(tmp_path).repeat()

    def seen(batches: Any) -> list[str]:
        return sorted(d for batch in batches for d in digests(batch["video"].numpy()))

    expected = seen(islice(pipe, 12))
    loaders = [tp.Loader(pipe.distributed(rank=r, world_size=2), num_workers=2) for r in range(2)]
    assert seen(batch for loader in loaders for batch in islice(loader, 6)) == expected


def test_it_pickles_and_is_written_as_yaml() -> None:
    pipe = tp.read_parquet("x").decode_video(
        "clip",
        fps=2.5,
        size=(20, 30),
        duration=tp.random_crop(2),
        times_column="t",
        on_error="skip",
    )
    assert pickle.loads(pickle.dumps(pipe)) == pipe
    assert config.loads(pipe.to_yaml()) == pipe


def test_the_package_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainpipes._internal.checks.find_spec", lambda name: None)
    with pytest.raises(tp.errors.MissingExtraError, match=r"pip install av$"):
        rows_of(VIDEO).decode_video()


MUTATED = """
import faulthandler, io, sys
import numpy as np
sys.path[:0] = {paths!r}
faulthandler.enable()
from video_fixtures import video
from trainpipes.media.sound import Clip
from trainpipes.media.video import Choice, NoVideo, frames_of, header_of
rng = np.random.default_rng(5)
kinds = [
    ("mp4", "libx264"), ("mp4", "mpeg4"), ("matroska", "libx264"), ("webm", "libvpx"), ("webm", "libvpx-vp9"),
    ("mpegts", "mpeg2video"), ("avi", "mpeg4"), ("flv", "libx264"), ("mp4", "libx265"), ("mov", "mjpeg"),
]
formats = {{"mjpeg": "yuvj420p"}}
files = [video(20, *kind, size=(16, 24), pixels=formats.get(kind[1], "yuv420p")) for kind in kinds]
decoded = 0
for number in range({count}):
    content = bytearray(files[number % len(files)])
    for _ in range(rng.integers(1, 9)):
        content[rng.integers(len(content) if number % 3 else 300)] = rng.integers(256)
    if number % 5 == 0:
        del content[rng.integers(len(content)) :]
    for choice, clip in ((Choice(count=3), Clip()), (Choice(rate=5), Clip(0.3, 0.4)), (Choice(), Clip())):
        try:
            frames_of(io.BytesIO(content), choice, clip)
            decoded += 1
        except NoVideo:
            pass
    try:
        header_of(io.BytesIO(content))
    except NoVideo:
        pass
print(decoded)
"""


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_files_give_frames_or_a_reason(count: int) -> None:
    program = MUTATED.format(paths=sys.path, count=count)
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=280)
    assert child.returncode == 0, child.stderr.decode()[-3000:]
    assert count < int(child.stdout) < 3 * count
