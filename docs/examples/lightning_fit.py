"""Train with Lightning; killed at any moment, go on, also on another number of devices.

python lightning_fit.py --files 'rows/*.parquet' --held-out 'more/*.parquet' --checkpoints run
"""

import argparse
import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint

import trainpipes as tp
from trainpipes.integrations.lightning import PipelineDataModule


def pipeline(files: str, tail: str = "even") -> tp.Pipeline:
    rows = tp.list_files(files).read_parquet(columns=["text"]).sharding_filter(24, tail=tail)
    return rows.shuffle(10_000, seed=0).tokenize("bytes", max_length=256).batch(4).pad_collate()


class NextByte(L.LightningModule):  # put your model here
    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Embedding(258, 258)

    def loss(self, batch):
        target = batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, -100)
        scores = self.scores(batch["input_ids"][:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), target.flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch), batch_size=len(batch["input_ids"]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(arguments=None, callbacks=()):
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--files", "--held-out", "--checkpoints"):
        parser.add_argument(name, required=True)
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args(arguments)
    data = PipelineDataModule(pipeline(args.files), pipeline(args.held_out, tail="uneven"))
    saves = ModelCheckpoint(args.checkpoints, every_n_train_steps=2, save_last=True)
    strategy = "ddp" if args.devices > 1 else "auto"
    options = {"max_epochs": 3, "logger": False, "callbacks": [saves, *callbacks]}
    trainer = L.Trainer(devices=args.devices, strategy=strategy, **options)
    last = os.path.join(args.checkpoints, "last.ckpt")
    trainer.fit(NextByte(), datamodule=data, ckpt_path=last if os.path.exists(last) else None)


if __name__ == "__main__":
    main()
