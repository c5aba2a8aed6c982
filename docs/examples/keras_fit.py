"""Train with Keras on torch; killed at any moment, go on.

python keras_fit.py --files 'rows/*.parquet' --held-out 'more/*.parquet' --folder run
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported

import keras

import trainpipes as tp
from trainpipes.integrations.keras import Backup, loader


def pairs(batch):  # x and y, both [B, L - 1]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return ids[:, :-1], ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)


def pipeline(files):
    rows = tp.list_files(files).read_parquet(columns=["text"]).shuffle(10_000, seed=0)
    return rows.tokenize("bytes", max_length=256).batch(4).pad_collate().map(pairs)


def main(arguments=None, callbacks=()):
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--files", "--held-out", "--folder"):
        parser.add_argument(name, required=True)
    args = parser.parse_args(arguments)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Embedding(258, 32), keras.layers.Dense(258)])  # yours
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-100)
    model.compile(optimizer="adam", loss=loss)
    train, held_out = loader(pipeline(args.files)), loader(pipeline(args.held_out))
    backup = Backup(train, args.folder, save_freq=5)
    options = {"epochs": 3, "shuffle": False, "verbose": 2, "callbacks": [backup, *callbacks]}
    model.fit(train, validation_data=held_out, **options)
    return model


if __name__ == "__main__":
    main()
