"""Each extra alone: installed in an environment of its own beside the five required packages, and used.

    python .ci/each_extra.py BASE WHEEL [EXTRA...]

BASE is an environment with trainpipes' wheel and nothing but what it requires; its packages are seen from
each new environment, so that torch is installed once. Run in the repository's root.
"""

# ruff: noqa: T201

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

#: Rows, tokenizers and places that uses share.
SHARED = """
import os, pathlib, sys, tempfile
import pyarrow as pa, pyarrow.parquet as pq, torch
import trainpipes as tp
assert "site-packages" in tp.__file__, tp.__file__
folder = pathlib.Path(tempfile.mkdtemp())
os.chdir(folder)
texts = tp.from_dataset([{"text": f"row {k}"} for k in range(8)])
column = torch.arange(8.0).view(8, 1)
numbers = tp.from_tensors(x=column, labels=column).sharding_filter(4)
batches = numbers.batch(2).collate()
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def forward(self, x, labels=None):
        loss = (self.layer(x) - labels).square().mean()
        return {"loss": loss}
"""

#: The smallest use of what each extra is for.
USES = {
    "tokenizers": """
from tokenizers import Tokenizer, models
words = Tokenizer(models.WordLevel({"row": 0, "[UNK]": 1}, "[UNK]"))
words.save("tokenizer.json")
assert len(list(texts.tokenize("tokenizer.json"))[0]["input_ids"])
""",
    "tiktoken": """
import tiktoken
ranks = {bytes([k]): k for k in range(256)}
own = tiktoken.Encoding("own", pat_str=".", mergeable_ranks=ranks, special_tokens={})
assert list(list(texts.tokenize(own))[0]["input_ids"]) == list(b"row 0")
""",
    "sentencepiece": """
import io, sentencepiece
model = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["row one", "row two"] * 50), model_writer=model, vocab_size=16, minloglevel=2,
    hard_vocab_limit=False)
pathlib.Path("own.model").write_bytes(model.getvalue())
assert len(list(texts.tokenize("own.model"))[0]["input_ids"])
""",
    "fast": """
from trainpipes_recipes.samples import train_tokenizer
train_tokenizer([("row one", "row two")] * 9, pathlib.Path("tokenizer.json"), 300)
pipe = texts.tokenize("tokenizer.json")
assert len(list(pipe)[0]["input_ids"]) and "gigatoken" in str(pipe.explain()), pipe.explain()
""",
    "hf": """
import datasets
rows = tp.from_hf(datasets.Dataset.from_dict({"text": ["a", "b"]}))
assert [list(row["input_ids"]) for row in rows.tokenize("bytes")] == [[97], [98]]
assert [row["text"] for row in texts.to_hf()][:2] == ["row 0", "row 1"]
import trainpipes.integrations.transformers
""",
    "transformers": """
import transformers
from tokenizers import Tokenizer, models
from trainpipes.integrations.transformers import Trainer
words = Tokenizer(models.WordLevel({"row": 0, "[UNK]": 1}, "[UNK]"))
fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[UNK]")
fast.chat_template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
told = tp.from_dataset([{"messages": [{"role": "assistant", "content": "row"}]}])
assert len(list(told.chat_template(fast))[0]["input_ids"])
options = transformers.TrainingArguments(
    "out", max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
Trainer(Model(), options, train_dataset=batches).train()
""",
    "accelerate": """
from accelerate import Accelerator
from trainpipes.integrations.accelerate import loader
accelerator = Accelerator(cpu=True)
assert len(list(loader(batches, accelerator))) == 4
""",
    "trl": """
import transformers
from tokenizers import Tokenizer, models
from trainpipes.integrations.trl import SFTTrainer
from trl import SFTConfig
words = Tokenizer(models.WordLevel({"row": 0, "[UNK]": 1}, "[UNK]"))
fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[UNK]", pad_token="[UNK]")
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
options = SFTConfig(
    "out", max_steps=1, report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
    per_device_train_batch_size=2)
pipe = texts.tokenize(fast, labels=True).sharding_filter(4).batch(2).pad_collate()
SFTTrainer(model, options, train_dataset=pipe, processing_class=fast).train()
""",
    "lightning": """
import lightning
from trainpipes.integrations.lightning import PipelineDataModule
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()
    def training_step(self, batch, _):
        return self.model(**batch)["loss"]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = lightning.Trainer(
    accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False)
trainer.fit(Module(), datamodule=PipelineDataModule(train=batches))
assert trainer.global_step == 4
""",
    "ray": """
import ray
ray.init(num_cpus=2, include_dashboard=False)
assert texts.sharding_filter(4).to_ray().count() == 8
import trainpipes.integrations.ray
ray.shutdown()
""",
    "yaml": """
pathlib.Path("texts.txt").write_text("one\\ntwo\\n")
pipe = tp.list_files("texts.txt").read_text()
pathlib.Path("pipe.yaml").write_text(pipe.to_yaml())
assert list(tp.load("pipe.yaml")) == list(pipe)
""",
    "cli": """
from trainpipes.cli.app import run
pathlib.Path("texts.txt").write_text("one\\ntwo\\n" * 9)
assert run(["inspect", "texts.txt"]) == 0
assert run(["run", "masked_lm", "--files", "texts.txt", "--tokenizer", "bytes"]) == 1  # has no mask token
assert run(["run", "pretrain", "--files", "texts.txt", "--tokenizer", "bytes", "--option",
            "num_shards=1", "--option", "max_length=16", "--steps", "2"]) == 0
""",
    # Nobody answers at this address: what is asked for it is there.
    "s3": """
os.environ.update(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x")
import botocore.config
options = {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 0}}}
try:
    retry = tp.Retry(deadline=2)
    files = tp.list_files("s3://bucket/x.parquet", storage_options=options, retry=retry)
    list(files.read_parquet())
except tp.UnreachableError:
    pass
""",
    "gcs": """
import fsspec
fsspec.filesystem("gs", token="anon", endpoint_url="http://127.0.0.1:9")
""",
    "delta": """
from deltalake import write_deltalake
write_deltalake("table", pa.table({"x": [1, 2, 3]}))
assert list(tp.read_delta("table")) == [{"x": 1}, {"x": 2}, {"x": 3}]
""",
    "iceberg": """
from pyiceberg.catalog import load_catalog
lake = {"name": "lake", "type": "sql", "uri": "sqlite:///lake.db", "warehouse": f"file://{folder}"}
catalog = load_catalog(**lake)
catalog.create_namespace("logs")
rows = pa.table({"x": [1, 2, 3]})
catalog.create_table("logs.rows", schema=rows.schema).append(rows)
assert [row["x"] for row in tp.read_iceberg("logs.rows", catalog=lake)] == [1, 2, 3]
""",
    "lance": """
import lance
lance.write_dataset(pa.table({"x": [1, 2, 3]}), "table.lance")
assert list(tp.read_lance("table.lance")) == [{"x": 1}, {"x": 2}, {"x": 3}]
""",
    "azure": """
import fsspec
fsspec.filesystem("az", account_name="x", account_key="eA==")
""",
    "audio": """
import io, soundfile
sound = io.BytesIO()
soundfile.write(sound, [0.0] * 800, 8000, format="WAV")
rows = tp.from_dataset([{"audio": sound.getvalue()}])
assert len(next(iter(rows.decode_audio(sampling_rate=16_000)))["audio"]) == 1600
import av
""",
    "video": """
import io, av
file = io.BytesIO()
with av.open(file, "w", format="mp4") as out:
    stream = out.add_stream("mpeg4", rate=5)
    stream.width = stream.height = 16
    for _ in range(5):
        out.mux(stream.encode(av.VideoFrame(16, 16, "rgb24")))
    out.mux(stream.encode(None))
rows = tp.from_dataset([{"video": file.getvalue()}])
assert next(iter(rows.decode_video(num_frames=2)))["video"].shape == (2, 16, 16, 3)
""",
    "images": """
import io
from PIL import Image
from trainpipes_recipes.images import images
file = io.BytesIO()
Image.new("RGB", (8, 8)).save(file, "JPEG")
rows = tp.from_dataset([{"image": file.getvalue(), "label": k % 2} for k in range(8)])
assert images(rows, size=4, batch_size=2, num_shards=1).peek()["images"].shape == (2, 3, 4, 4)
""",
}


def extras() -> dict[str, list[str]]:
    """What each extra brings, but for the one that brings all."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    return {k: v for k, v in project["optional-dependencies"].items() if k != "all"}


def try_one(extra: str, base: Path, wheel: Path, folder: Path) -> str:
    """Install an extra alone, and use it; what went wrong, or nothing."""
    made = folder / extra
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    (there,) = base.glob("lib/python*/site-packages")
    (own,) = made.glob("lib/python*/site-packages")
    (own / "base.pth").write_text(f"{there.resolve()}\n")
    pip = [
        base / "bin" / "python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        made / "bin" / "python",
    ]
    installed = subprocess.run(
        [*pip, "install", "--quiet", "--constraint", "constraints.txt", f"{wheel}[{extra}]"],
        capture_output=True, text=True,
    )  # fmt: skip
    if installed.returncode:
        return f"{installed.stdout}{installed.stderr}"
    used = subprocess.run(
        [made / "bin" / "python", "-I", "-c", SHARED + USES[extra]],
        cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    shutil.rmtree(made)
    return f"{used.stdout}{used.stderr}" if used.returncode else ""


def main(base: str, wheel: str, *asked: str) -> int:
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        for extra in asked or extras():
            start = time.monotonic()
            fault = try_one(extra, Path(base), Path(wheel).resolve(), Path(name))
            said = "is not enough:" if fault else "is enough"
            print(
                f"{extra} {said} ({time.monotonic() - start:.0f} s)\n{fault}".rstrip(), flush=True
            )
            wrong += bool(fault)
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
