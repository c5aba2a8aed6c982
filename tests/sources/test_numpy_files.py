"""Arrays of .npy and .npz files as rows: what is peculiar to them."""

from __future__ import annotations

import tracemalloc

import fsspec
import numpy as np
import pytest
import torch

import trainpipes as tp

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
          "float16", "float32", "float64", "complex64"]  # fmt: skip


def column(pipe: tp.Pipeline, name: str = "array") -> torch.Tensor:
    return torch.stack([row[name] for row in pipe])


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_come_back_bit_for_bit(dtype, tmp_path):
    array = np.random.default_rng(0).integers(0, 2, (10, 2, 3)).astype(dtype)
    np.save(tmp_path / "x.npy", array)
    found = column(tp.read_numpy(tmp_path / "x.npy"))
    assert found.numpy().tobytes() == array.tobytes()
    assert str(found.dtype) == f"torch.{dtype}"


def test_order_of_elements_and_of_bytes_is_put_right(tmp_path):
    array = np.arange(24).reshape(6, 4)
    np.save(tmp_path / "x.npy", np.asfortranarray(array))
    np.save(tmp_path / "y.npy", array.astype(">i8"))
    memory = fsspec.filesystem("memory")
    for name in ("x.npy", "y.npy"):
        assert column(tp.read_numpy(tmp_path / name)).tolist() == array.tolist()
        url = f"memory://numpy/{tmp_path.name}/{name}"
        memory.pipe_file(url, (tmp_path / name).read_bytes())
        assert column(tp.read_numpy(url)).tolist() == array.tolist()


def test_fields_of_a_structured_array_are_columns(tmp_path):
    array = np.zeros(5, [("x", "<i4"), ("image", "<f4", (2, 2)), ("name", "U4")])
    array["x"], array["image"][:, 1, 1] = range(5), range(5)
    np.save(tmp_path / "rows.npy", array)
    with pytest.raises(tp.UnreadableError, match=r"'name' is of <U4.*Parquet"):
        list(tp.read_numpy(tmp_path))
    rows = list(tp.read_numpy(tmp_path, ["image", "x"]))
    assert list(rows[3]) == ["image", "x"]
    assert rows[3]["image"].tolist() == [[0, 0], [0, 3]]
    assert rows[3]["x"] == 3


def test_a_file_of_several_arrays_is_refused(tmp_path):
    with open(tmp_path / "two.npy", "wb") as file:
        for n in range(2):
            np.save(file, np.arange(4) + n)
    said = r"two\.npy: it goes on behind its array, at byte 160 of 320.*numpy\.savez"
    with pytest.raises(tp.UnreadableError, match=said):
        list(tp.read_numpy(tmp_path))


@pytest.mark.filterwarnings("ignore:Stored array in format 3.0")
def test_names_of_fields_may_be_of_any_script(tmp_path):
    array = np.zeros(2, [("größe", "<i4"), ("漢", "<i4")])
    array["漢"] = [3, 4]
    np.save(tmp_path / "rows.npy", array)
    assert list(tp.read_numpy(tmp_path)) == [{"größe": 0, "漢": 3}, {"größe": 0, "漢": 4}]


def test_rows_of_compressed_arrays_cannot_be_chosen_by_number(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(40))
    np.savez_compressed(tmp_path / "c.npz", x=np.arange(3))
    with pytest.raises(tp.ConfigError, match=r"in NumPy files that are .*c\.npz is not"):
        list(tp.read_numpy(tmp_path).shuffle(scope="global"))


def test_arrays_that_do_not_fit_together_are_named(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(4), y=np.arange(4))
    for other, said in (
        ({"x": np.arange(3), "y": np.arange(4)}, r"\{'x': 3, 'y': 4\}"),
        ({"x": np.arange(4)}, r"a\.npz has a column 'y', and .*b\.npz has not"),
        (
            {"x": np.arange(4), "y": np.arange(4), "z": np.arange(4)},
            r"b\.npz has a column 'z', and .*a\.npz has not",
        ),
        ({"x": np.arange(4.0), "y": np.arange(4)}, r"int64\[\] in .*a\.npz and float64\[\] in"),
        ({"x": np.zeros((4, 2), int), "y": np.arange(4)}, r"int64\[\] .* int64\[2\]"),
    ):
        np.savez(tmp_path / "b.npz", **other)
        with pytest.raises(tp.SchemaError, match=said) as caught:
            list(tp.read_numpy(tmp_path))
        assert caught.value.path == str(tmp_path / "b.npz")
    np.savez(tmp_path / "b.npz", x=np.arange(4), z=np.arange(5))
    assert column(tp.read_numpy(tmp_path, ["x"]), "x").tolist() == [0, 1, 2, 3] * 2
    with pytest.raises(tp.SchemaError, match=r"no column 'y' in .*b\.npz; there are \['x', 'z'\]"):
        list(tp.read_numpy(tmp_path, ["y"]))


def test_a_compressed_array_is_unpacked_once_and_not_copied(tmp_path):
    path, numbers = tmp_path / "a.npz", np.zeros((1 << 19, 8), np.float32)
    numbers[::1000] = 7
    np.savez_compressed(path, x=numbers, y=np.asfortranarray(numbers[:, :2]))
    pipe = tp.list_files(path).read_numpy(columns=["x"], index=False)
    assert len(pipe) == len(numbers)
    tracemalloc.start()
    try:
        first = next(iter(tp.Loader(pipe.batch(2), threads=0)))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert first[0]["x"].tolist() == numbers[0].tolist()
    assert most < 1.3 * numbers.nbytes
    both = next(iter(tp.list_files(path).read_numpy().batch(1 << 19).collate()))
    assert np.array_equal(both["x"].numpy(), numbers)
    assert np.array_equal(both["y"].numpy(), numbers[:, :2])
