"""Write small data to try every recipe on, without a download.

    python -m trainpipes_recipes.samples samples

All of it is made of the source of Python's standard library; the pictures are drawn:

    functions/*.parquet    prompt: a function's signature and docstring; response: its body
    texts/*.parquet        text: whole functions
    chats.jsonl            messages: questions about functions, and answers
    preferences.parquet    prompt, chosen: the function's body; rejected: that of another function
    topics.parquet         text: a function; label: the part of the library that it is from
    purchases/*.parquet    who was shown what, by day, and what they saw before; label: whether they bought
    ids/train.bin          the texts as token ids, uint16, one after the other
    pictures/              JPEGs of triangles, squares and hexagons, a folder each (needs Pillow)
    videos/                MP4 files of squares that move, a folder for each way (needs av)
    scenes.jsonl           messages: questions about the pictures, and answers; images: their paths
    processor/             a processor for these, as transformers loads one
    beeps/                 WAV files of one to three tones
    speech.jsonl           audio: the paths of these; text: the names of the tones
    tokenizer/             a byte-level BPE tokenizer with a chat template, as transformers loads it
    model/config.json      of a small causal language model
    vision/config.json     of a small network for pictures
    sight/config.json      of a small model of pictures and text
    ears/config.json       of a small recognizer of speech
    eyes/config.json       of a small classifier of videos
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
import textwrap
import wave
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

__all__ = [
    "function_pairs", "main", "train_tokenizer", "write_configs", "write_functions", "write_purchases",
    "write_samples", "write_scenes", "write_speech", "write_tokenizer", "write_videos",
]  # fmt: skip

IMAGE = "<image>"
#: Pixels down and to the right, in two frames; videos of each.
MOVES, VIDEOS = {"up": (-1, 0), "down": (1, 0), "right": (0, 1)}, 16
#: Hertz.
TONES = {"low": 220, "mid": 660, "high": 1980}
END, PAD, MASK, START, STOP = "<eos>", "<pad>", "<mask>", "<|im_start|>", "<|im_end|>"
#: Folders of the standard library that hold no library code, or packages of others.
LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
#: Rows of files, in hundredths of all, and of their row groups: uneven, as real files are.
FILES = ((40, 700), (5, 90), (25, 1100), (2, 33), (28, 256))
#: Turns as ChatML writes them; the assistant's text is marked, as transformers knows it.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: The same of messages whose content has parts, some of them pictures.
SEEN = TEMPLATE.replace(
    "{{ message.content }}",
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}",
)
#: What a function is about, by a word in it; the first that is there counts.
TOPICS = ("socket", "thread", "path", "date", "xml", "email", "test", "parse", "read")
#: Sides of the shapes that pictures show.
SHAPES = {"triangle": 3, "square": 4, "hexagon": 6}
PICTURES, SIDE = 40, 96


def function_pairs(every: int = 1) -> Iterator[tuple[str, str]]:
    """Prompt and response of each function of the standard library with a docstring."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if not LEFT_OUT & set(p.relative_to(root).parts))
    for path in paths[::every]:
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # deliberately broken examples, and other encodings
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
                doc, body = node.body[0].end_lineno or 0, node.body[1]
                first = body.lineno - len(getattr(body, "decorator_list", ()))
                if ast.get_docstring(node) and first > doc:
                    prompt = "\n".join(lines[node.lineno - 1 : doc])
                    response = "\n".join(lines[doc : node.end_lineno])
                    yield textwrap.dedent(prompt), textwrap.dedent(response).strip("\n")


def write_samples(folder: Path, every: int = 1) -> None:
    pairs = [pair for pair in function_pairs(every) if pair[1].strip()]
    prompts, bodies = map(list, zip(*pairs, strict=True))
    texts = ["\n".join(pair) for pair in pairs]
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / "tokenizer", pairs)
    write_functions(pairs, folder / "functions")
    pq.write_table(pa.table({"text": texts}), folder / "texts" / "0.parquet", row_group_size=500)
    write_chats(folder / "chats.jsonl", pairs)
    choices = {"prompt": prompts, "chosen": bodies, "rejected": [*bodies[1:], bodies[0]]}
    pq.write_table(pa.table(choices), folder / "preferences.parquet")
    topics = [next((topic for topic in TOPICS if topic in text.lower()), None) for text in texts]
    labeled = pa.table({"text": texts, "label": topics})
    pq.write_table(labeled.drop_null(), folder / "topics.parquet")
    write_purchases(folder / "purchases")
    write_ids(folder, texts)
    if find_spec("PIL"):
        draw_pictures(folder / "pictures")
        write_scenes(folder)
    if find_spec("av"):
        write_videos(folder / "videos")
    write_speech(folder)
    write_configs(folder)


def write_functions(pairs: Sequence[tuple[str, str]], folder: Path) -> list[Path]:
    """Write "prompt" and "response" to files of uneven sizes and row groups."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts, bodies = map(list, zip(*pairs, strict=True))
    table, paths, before = pa.table({"prompt": prompts, "response": bodies}), [], 0
    for number, (part, rows) in enumerate(FILES):
        start, stop = (len(table) * edge // 100 for edge in (before, before + part))
        paths.append(folder / f"functions-{number}.parquet")
        pq.write_table(table.slice(start, stop - start), paths[-1], row_group_size=rows)
        before += part
    return paths


def write_purchases(folder: Path, rows: int = 4000) -> None:
    """Write a table of numbers, categories and lists, by day, with nulls: bought is whether the item is in
    ``seen`` and cheap for the user.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    users, items = random.zipf(1.3, rows) % 200, random.zipf(1.3, rows) % 50
    income = random.lognormal(3, 0.5, 200)[users]
    price = random.lognormal(2, 1, 50)[items] * random.uniform(0.8, 1.2, rows)
    seen = [random.integers(0, 50, n).tolist() for n in random.integers(0, 6, rows)]
    fond = np.array([item in liked for item, liked in zip(items.tolist(), seen, strict=True)])
    days = np.sort(random.integers(0, 90, rows)).astype(np.int32)
    purchases = {
        "day": pa.array(days + 20_454).cast(pa.date32()),  # from 2026-01-01 on
        "user": users, "item": items,
        "income": pa.array(income, mask=random.random(rows) < 0.1),
        "price": price,
        "device": pa.array(random.choice(["phone", "web", "shop"], rows), mask=random.random(rows) < 0.1),
        "seen": pa.array(seen, pa.list_(pa.int64())),
        "label": (price < income / 3) & (fond | (random.random(rows) < 0.3)),
    }  # fmt: skip
    table = pa.table(purchases)
    for number, (start, stop) in enumerate([(0, rows // 2), (rows // 2, rows)]):
        pq.write_table(
            table.slice(start, stop - start), folder / f"{number}.parquet", row_group_size=700
        )


def write_configs(folder: Path) -> None:
    """Models that train in seconds: of text, of pictures, of both, of speech, and of videos."""
    llama = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 192}
    llama |= {"num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True}
    resnet = {"model_type": "resnet", "embedding_size": 16, "layer_type": "basic"}
    resnet |= {"hidden_sizes": [16, 32, 64], "depths": [1, 1, 1]}
    sight = {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128}
    sight |= {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56, "patch_size": 14}
    both = {"model_type": "llava", "vision_config": sight, "image_token_id": 2048}
    both |= {"text_config": {**llama, "vocab_size": 2049}, "vision_feature_layer": -1}
    ears = {"model_type": "whisper", "vocab_size": 258, "d_model": 32, "max_source_positions": 50}
    ears |= {"max_target_positions": 32, "decoder_start_token_id": 256, "eos_token_id": 256}
    ears |= {"pad_token_id": 257, "bos_token_id": 256, "suppress_tokens": [], "dropout": 0.0}
    for part in ("encoder", "decoder"):
        ears |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 32}
    write_json(folder / "ears" / "config.json", ears)
    write_json(folder / "sight" / "config.json", both)
    write_json(folder / "model" / "config.json", llama)
    write_json(folder / "vision" / "config.json", resnet)
    eyes = {"model_type": "videomae", "image_size": 32, "patch_size": 16, "num_frames": 4}
    eyes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    eyes |= {"num_attention_heads": 2}
    write_json(folder / "eyes" / "config.json", eyes)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_tokenizer(folder: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """A tokenizer as transformers saves one."""
    named = {"eos_token": END, "pad_token": PAD, "mask_token": MASK, "chat_template": TEMPLATE}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    write_json(folder / "tokenizer_config.json", config)
    train_tokenizer(pairs, folder / "tokenizer.json")


def train_tokenizer(pairs: Sequence[tuple[str, str]], path: Path, vocabulary: int = 2048) -> None:
    """Train a byte-level BPE tokenizer and write its ``tokenizer.json``."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    special = [END, PAD, MASK, START, STOP]
    texts = (text for pair in pairs for text in pair)
    tokenizer.train_from_iterator(texts, vocabulary, show_progress=False, special_tokens=special)
    tokenizer.save(str(path))


def write_chats(path: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """Conversations of two or four messages, some with a system's before them."""
    with open(path, "w", encoding="utf-8") as file:
        for number, (prompt, body) in enumerate(pairs):
            head, _, doc = prompt.partition("\n")
            turns = [("user", f"What does this do?\n{head}"), ("assistant", doc.strip(' "\n'))]
            if number % 3:
                turns += [("user", "How is it written?"), ("assistant", body)]
            if number % 5 == 0:
                turns.insert(0, ("system", "You know Python's standard library."))
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_ids(folder: Path, texts: Sequence[str]) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    rows = tokenizer.encode_batch([text + END for text in texts])
    (folder / "ids").mkdir(exist_ok=True)
    np.concatenate([row.ids for row in rows]).astype(np.uint16).tofile(folder / "ids" / "train.bin")


def draw_pictures(folder: Path) -> None:
    from PIL import Image, ImageDraw

    rng = np.random.default_rng(0)
    for name, sides in SHAPES.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(PICTURES):
            radius = int(rng.integers(SIDE // 6, SIDE // 3))
            x, y = rng.integers(radius, SIDE - radius, 2).tolist()
            ground, ink = (tuple(color) for color in rng.integers(256, size=(2, 3)).tolist())
            picture = Image.new("RGB", (SIDE, SIDE), ground)
            ImageDraw.Draw(picture).regular_polygon((x, y, radius), sides, fill=ink)
            picture.save(folder / name / f"{number}.jpg", quality=90)


def write_scenes(folder: Path) -> None:
    """Conversations about the pictures, none, one or two in each, and a processor."""
    from tokenizers import Tokenizer

    with open(folder / "scenes.jsonl", "w", encoding="utf-8") as file:
        for number in range(3 * PICTURES):
            names = [*SHAPES][number % 3 :][: number % 4]
            asked = [{"type": "image"}] * len(names)
            asked += [{"type": "text", "text": "Which shapes are these?"}]
            answer = [{"type": "text", "text": ", ".join(names) or "There is none."}]
            talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            paths = [f"pictures/{name}/{number // 3}.jpg" for name in names]
            file.write(json.dumps({"messages": talk, "images": paths}) + "\n")
    size = {"height": 56, "width": 56}
    pictures = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}}
    processor = {"processor_class": "LlavaProcessor", "patch_size": 14, "image_token": IMAGE}
    processor |= {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    processor |= {"image_processor": {**pictures, "crop_size": size}}
    write_json(folder / "processor" / "processor_config.json", processor)
    (folder / "processor" / "chat_template.jinja").write_text(SEEN)
    named = {"eos_token": END, "pad_token": PAD, "extra_special_tokens": [IMAGE]}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    write_json(folder / "processor" / "tokenizer_config.json", config)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    tokenizer.add_special_tokens([IMAGE])
    tokenizer.save(str(folder / "processor" / "tokenizer.json"))


def write_videos(folder: Path) -> None:
    """Squares that move up, down or to the right, in a folder each: 2 s of 10 frames."""
    import av

    rng = np.random.default_rng(0)
    for name, (down, across) in MOVES.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(VIDEOS):
            top, left = rng.integers(12, 24, 2).tolist()
            with av.open(str(folder / name / f"{number}.mp4"), "w") as out:
                stream: Any = out.add_stream("mpeg4", rate=10)
                stream.height = stream.width = 48
                for n in range(20):
                    picture = np.full((48, 48, 3), 9 * number, np.uint8)
                    y, x = top + down * n // 2, left + across * n // 2
                    picture[y : y + 12, x : x + 12] = 250
                    out.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
                out.mux(stream.encode(None))


def write_speech(folder: Path) -> None:
    """Tones of 0.2 s, one to three in a row, and their names."""
    (folder / "beeps").mkdir(exist_ok=True)
    time = np.arange(1600) / 8000
    with open(folder / "speech.jsonl", "w", encoding="utf-8") as file:
        for number in range(240):
            names = [[*TONES][number // 3**k % 3] for k in range(1 + number % 3)]
            waves = [np.sin(2 * np.pi * TONES[name] * time) for name in names]
            samples = (8000 * np.concatenate(waves)).astype("<i2")
            with wave.open(str(folder / "beeps" / f"{number}.wav"), "wb") as sound:
                sound.setnchannels(1)
                sound.setsampwidth(2)
                sound.setframerate(8000)
                sound.writeframes(samples.tobytes())
            row = {"audio": f"beeps/{number}.wav", "text": " ".join(names)}
            file.write(json.dumps(row) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m trainpipes_recipes.samples", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--every", type=int, default=1, help="use every n-th source file only")
    args = parser.parse_args(arguments)
    write_samples(args.folder, args.every)
    print(f"wrote {args.folder}: " + ", ".join(sorted(p.name for p in args.folder.iterdir())))


if __name__ == "__main__":
    main()
