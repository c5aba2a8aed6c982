"""The measurements beside the suite, at a small size, as ``--check`` runs them.

    python -m benchmarks.alone NAME [--tiny]

Prints the figures of one as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import trainpipes as tp
from benchmarks import (
    audio,
    collating,
    even,
    footers,
    format_peers,
    formats,
    images_decode,
    imports,
    map_workers,
    memmap,
    mix,
    packing,
    samplers,
    scale,
    state,
    tables,
    videos,
    wide,
)
from benchmarks.processes import pss
from benchmarks.turns import against

__all__ = ["ALONE", "NEEDS"]

Figures = dict[str, float]


def of_memmap(tiny: bool) -> Figures:
    with tempfile.TemporaryDirectory() as name:
        images, batches = (16, 5) if tiny else (350, 300)
        took = memmap.image_times(Path(name), images, 1 if tiny else 5)
        tokens = memmap.token_times(
            Path(name), 200_000 if tiny else 20_000_000, batches, 1 if tiny else 5
        )
    jpeg, mapped = "DataLoader over JPEG files, shuffled", took["from_memmap, shuffled"]
    return {
        "images, DataLoader": took[jpeg] / mapped,
        "images, from_dataset": took["from_dataset, shuffled"] / mapped,
        "nanoGPT ms": tokens["nanoGPT's get_batch"] * 1e3 / batches,
        "global ms": tokens['shuffle(scope="global")'] * 1e3 / batches,
        "window ms": tokens["shuffle(8192)"] * 1e3 / batches,
    }


def of_samplers(tiny: bool) -> Figures:
    rates = samplers.rates_of(10_000 if tiny else 2_000_000, 1 if tiny else 5)
    return {"ns a row": 1e9 / rates["RandomSampler"]}


def of_collating(tiny: bool) -> Figures:
    took = collating.micros_of(320 if tiny else 32_000, 1 if tiny else 7)
    found = {
        kind: took[f"{kind}, DataLoader"] / max(1e-9, took[f"{kind}, collate"])
        for kind in ("ints", "tuples", "dicts")
    }
    return found | {"columns": took["columns, pad_collate"] / max(1e-9, took["columns, collate"])}


def of_packing(tiny: bool) -> Figures:
    lengths = packing.lengths_of(160 if tiny else 8_192, 831, 1.0)
    methods = dict(packing.padding_of(lengths, 4096, ours=True))
    found: Figures = {}
    for name, kept in methods.items():
        if kept is not None:
            found[name.removeprefix("**pack**, ").removesuffix(" documents")] = kept.empty
    best = methods["**pack**, best_fit, 1024 documents"]
    found["split"] = 1.0 if best is None else best.split
    for name, share, _ in packing.batches_of(lengths):
        known = name.startswith("bucket_by_length(max_tokens")
        found["bucket_by_length(max_tokens)" if known else name] = share
    some, vocabulary = lengths[: len(lengths) // 4], 300 if tiny else 8192
    costs, _ = packing.costs_of(some, 4096, 1 if tiny else 5, vocabulary)
    found["ns a token"] = costs["pack, best_fit"]
    found["of tokenizing"] = costs["pack, best_fit"] / costs["tokenize"]
    return found


def of_even(tiny: bool) -> Figures:
    rows = even.rows_of(even.lognormal(2_000 if tiny else 60_000, 0))
    names = (
        "bucket_by_length(8)",
        'batch(max_tokens=4096), cost="attention"',
        "pack(2048).batch(2)",
    )
    buckets, budget, packed = (even.WAYS[name][1](rows) for name in names)
    others = [
        even.rows_of(lengths(2_000 if tiny else 60_000, 0))
        for name, lengths in even.LENGTHS.items()
        if name != "lognormal"
    ]
    of_others = [even.WAYS[names[0]][1](one) for one in others]
    return {
        "buckets, 64 ranks": even.figures_of(buckets, 64)[0],
        "buckets, 8 ranks": even.figures_of(buckets, 8)[0],
        "buckets, other lengths, 64 ranks": min(even.figures_of(one, 64)[0] for one in of_others),
        "buckets, other lengths, 8 ranks": min(even.figures_of(one, 8)[0] for one in of_others),
        "attention, pack, other lengths": max(
            even.figures_of(even.WAYS[names[2]][1](one), 64)[2] for one in others
        ),
        "attention, max_tokens": even.figures_of(budget, 64)[2],
        "attention, pack": even.figures_of(packed, 64)[2],
    }


def of_mix(tiny: bool) -> Figures:
    rows = 4_000 if tiny else 100_000
    found = mix.choosing(rows, 1 if tiny else 5)
    found["rows off"] = mix.most_off(mix.order_of(mix.THREE, rows), rows)
    return found


def of_state(tiny: bool) -> Figures:
    found = state.measured((64,), 1 if tiny else 5)[64]
    return {
        "bytes of 64": found["bytes"],
        "bytes, counted": found["bytes, counted"],
        "bytes a shard": found["bytes a shard"],
        "delivered, us": found["delivered batch, us"],
        "us a shard": found["state_dict(), us a shard"],
    }


def of_footers(tiny: bool) -> Figures:
    files = 20 if tiny else 1000
    took = footers.start_times(files, 1 if tiny else 5)
    return {"ms a footer": took["footers"] * 1e3 / files, "ms with the index": took["index"] * 1e3}


def of_imports(tiny: bool) -> Figures:
    took = imports.import_times(1 if tiny else 10)
    return {"of torch": took["trainpipes"] / took["torch"]}


def of_formats(tiny: bool) -> Figures:
    return formats.measured(2_000 if tiny else 60_000, 1 if tiny else 5)


def of_from_hf(tiny: bool) -> Figures:
    return format_peers.of_dataset(300 if tiny else 40_000, 1 if tiny else 3)


def of_webdataset(tiny: bool) -> Figures:
    return format_peers.of_tar(40 if tiny else 4_000, 1 if tiny else 3)


def of_scale(tiny: bool) -> Figures:
    found = scale.planned(2_000 if tiny else 1_000_000, 8 if tiny else 4096, 4, 1)
    return {"seconds": found["seconds"], "gigabytes": found["grown"]}


def of_map_workers(tiny: bool) -> Figures:
    rates = map_workers.rates_of(16 if tiny else 300, 2, 1 if tiny else 3)
    plain = rates["DataLoader, workers"]
    python = "Loader, workers, Python"
    return {
        "threads": rates["map, threads"] / plain,
        "processes": rates["map, processes"] / plain,
        "a Loader's workers": rates["Loader, workers"] / plain,
        "a Loader's workers, Python": rates[python] / rates[f"Data{python}"],
    }


def of_images_decode(tiny: bool) -> Figures:
    rates = images_decode.rates_of(16 if tiny else 350, 2, 1 if tiny else 5)
    return {"of a DataLoader": rates["decode_image"] / rates["DataLoader, workers"]}


def of_audio(tiny: bool) -> Figures:
    turns = audio.rates_of(16 if tiny else 160, 2, 1 if tiny else 7, "FLAC")
    own, alone = "decode_audio", "threads, decoding alone"
    return {
        "of a DataLoader": against(turns, own, "DataLoader, workers"),
        "of threads": against(turns, own, alone),
        "processor, of threads": against(turns, own, alone, processor=True),
    }


def of_videos(tiny: bool) -> Figures:
    own, workers, alone = "decode_video", "DataLoader, workers", "threads alone"
    names = own, workers, alone
    turns = videos.rates_of(8 if tiny else 24, 2, 1 if tiny else 4, names, made=1 if tiny else 3)
    return {
        "of a DataLoader": against(turns, own, workers),
        "of threads": against(turns, own, alone),
        "processor, of threads": against(turns, own, alone, processor=True),
    }


def of_memory(tiny: bool) -> Figures:
    """What this process holds after many epochs, over what it held after a few."""
    table = mix.table_of(1_000 if tiny else 60_000, 150, 0)
    loader = tp.Loader(mix.finished(tp.from_arrow(table).shuffle(4096)))
    held = []
    for _ in range(8):
        for _ in loader:
            pass
        gc.collect()
        held.append(pss(os.getpid()))
    return {"grown": held[7] / held[2]}


def of_wide(tiny: bool) -> Figures:
    rates = wide.rates_of(2_000 if tiny else 400_000, 24 if tiny else 120, 1 if tiny else 5)
    lines, own = rates["forty lines"], rates["ours, 2 threads"]
    return {
        "of forty lines": own / lines,
        "of forty lines, float32": rates["ours, 2 threads, float32"] / lines,
        "of forty lines, float32, no threads": rates["ours, no threads, float32"] / lines,
        "of the scan": own / rates["scan"],
    }


def of_tables(tiny: bool) -> Figures:
    rows, repeats = 2_000 if tiny else 1_000_000, 1 if tiny else 3
    of_take = {}
    for size in (256, 4096):
        rates = tables.rates_of(rows, 2 if tiny else 2_000_000 // size // 10, repeats, size)
        of_take[f"of take, {size}"] = rates["global shuffle"] / rates["take"]
    return of_take


ALONE: dict[str, Callable[[bool], Figures]] = {
    "memmap": of_memmap,
    "samplers": of_samplers,
    "collating": of_collating,
    "packing": of_packing,
    "even": of_even,
    "mix": of_mix,
    "state": of_state,
    "footers": of_footers,
    "imports": of_imports,
    "formats": of_formats,
    "from_hf": of_from_hf,
    "webdataset": of_webdataset,
    "scale": of_scale,
    "map_workers": of_map_workers,
    "wide": of_wide,
    "tables": of_tables,
    "images_decode": of_images_decode,
    "audio": of_audio,
    "videos": of_videos,
    "memory": of_memory,
}

#: The environments of those that need a peer.
NEEDS = {"from_hf": "hf", "webdataset": "webdataset"}


def main(arguments: list[str]) -> None:
    print("\n" + json.dumps(ALONE[arguments[0]]("--tiny" in arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
