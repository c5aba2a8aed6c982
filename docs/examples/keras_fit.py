"""Train with Keras on torch; killed at any moment, go on.

python keras_fit.py --files 'rows/*.parquet' --held-out 'more/*.parquet' --folder run
"""

import argparse
import json
import os
import shutil
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported

import keras

import trainpipes as tp

EPOCHS = 3
SAVE_EVERY = 5  # batches


def pairs(batch):  # x and y, both [B, L - 1]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return ids[:, :-1], ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)


def pipeline(files):
    rows = tp.list_files(files).read_parquet(columns=["text"]).shuffle(10_000, seed=0)
    return rows.tokenize("bytes", max_length=256).batch(4).pad_collate().map(pairs)


class Batches(keras.utils.PyDataset):
    """Batches by their numbers: Keras asks for the first of an epoch once more, to learn its shapes.

    Batch ``index`` of an epoch is number ``epoch * steps + done + index`` of a pipeline that repeats. Where
    the pipeline ends by itself, as for an evaluation, ``epoch`` stays 0.
    """

    def __init__(self, pipe, steps):
        super().__init__()
        self.pipe, self.loader, self.steps = pipe, tp.Loader(pipe), steps
        self.epoch = self.done = 0  # batches of the epoch that were trained on before
        self.number, self.batch, self.batches = -1, None, iter(self.loader)  # the one given last

    @property
    def num_batches(self):
        return self.steps - self.done

    def __getitem__(self, index):
        number = self.epoch * self.steps + self.done + index
        if number not in (self.number, self.number + 1):
            self.seek(number, self.pipe.state_at(number))
        if number != self.number:
            self.number, self.batch = number, next(self.batches)
        return self.batch

    def seek(self, number, state):
        self.loader.load_state_dict(state)
        self.number, self.batches = number - 1, iter(self.loader)

    def state_dict(self):
        return {"number": self.number + 1, "loader": self.loader.state_dict()}

    def load_state_dict(self, state):
        self.seek(state["number"], state["loader"])
        self.epoch, self.done = divmod(state["number"], self.steps)


class Backup(keras.callbacks.Callback):
    """Saves weights, optimizer and position together, as folder/step-N: whole, or not there."""

    def __init__(self, data, folder):
        super().__init__()
        self.data, self.folder = data, Path(folder)
        self.to_load = self.newest()
        if self.to_load is not None:
            data.load_state_dict(json.loads((self.to_load / "data.json").read_text()))

    def newest(self):
        return max(self.folder.glob("step-*"), default=None)

    def on_train_begin(self, logs=None):  # the model is built, and its optimizer
        if self.to_load is not None:
            self.model.load_weights(self.to_load / "model.weights.h5")
            self.to_load = None

    def on_train_batch_end(self, batch, logs=None):
        state = self.data.state_dict()
        if state["number"] % SAVE_EVERY == 0:
            before, unfinished = self.newest(), self.folder / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            self.model.save_weights(unfinished / "model.weights.h5")
            (unfinished / "data.json").write_text(json.dumps(state))
            unfinished.rename(self.folder / f"step-{state['number']:08}")
            if before is not None:
                shutil.rmtree(before)


def fit(model, train, valid, folder, callbacks=()):
    callbacks = [Backup(train, folder), *callbacks]
    for epoch in range(train.epoch, EPOCHS):
        options = {"initial_epoch": epoch, "epochs": epoch + 1, "shuffle": False, "verbose": 2}
        model.fit(train, validation_data=valid, callbacks=callbacks, **options)
        train.epoch, train.done = epoch + 1, 0


def main(arguments=None, callbacks=()):
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--files", "--held-out", "--folder"):
        parser.add_argument(name, required=True)
    args = parser.parse_args(arguments)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Embedding(258, 32), keras.layers.Dense(258)])  # yours
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-100)
    model.compile(optimizer="adam", loss=loss)

    rows, held_out = pipeline(args.files), pipeline(args.held_out)
    train, valid = Batches(rows.repeat(), len(rows)), Batches(held_out, len(held_out))
    fit(model, train, valid, args.folder, callbacks)
    return model


if __name__ == "__main__":
    main()
