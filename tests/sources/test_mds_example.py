"""docs/examples/mds.py reads what MosaicML Streaming 0.13.0 wrote."""

from __future__ import annotations

import zlib
from base64 import b64decode
from pathlib import Path

import pytest

import trainpipes as tp
from frameworks.example import example
from trainpipes.testing import check_resume

#: The first two shards and the last, by MDSWriter(columns={"id": "int", "text": "str", "raw": "bytes", "ids":
#: "ndarray:int32", "pair": "ndarray:float32:2", "any": "ndarray", "small": "uint8", "score": "float64",
#: "meta": "json", "big": "str_int"}, size_limit=600), compressed by zlib.
SHARDS = [
    "eNpdkUlOwzAUhp2oQgiWXCDyuoukRVWVTdRzIBS5idsaeahsByhVJdbchHNwATYch+F5gghL9vvf9D1bzhFCLxlCH7DLHKEj"
    "7hQfhGyp7FTP5NbgurjBsidakwOeFthY3TJpnYwmJmtw5zMXuDNKjhMbrgikap9cHyw1Tvjo4trJAVqXEY5vwcZLSCJouACR"
    "fviabf3gPpyeI6glzu4J085q8uBRndLUC0E4d8LSRzumG/YU6HLgfFqEc5nEPxdEFXQgiL2mxjB4aB0r8EZpQSz4WISb7YjZ"
    "hQmux41rORPMlSzKEkL3VEfE7HQJPwGfgM5gn6O/tZpkSVaf32GF0BG7zvIUs81vyxVs+Et0EVFZ9FeTPJUkZlV+JWae4oFb"
    "Afe5GXHfm+zt9QfPu49A",
    "eNpdUUtuwjAQdQKLrnqBbiKvWQRaIZQN9BxVFQ2JAVf+INtpS1G3vQvn4CK9Qk/QzthGQrX0/J7n82aiFIyxr4KxH8SRd1YN"
    "2rTCdLaXZut5Uz1x04NzcOCTivvgWmkCyUw52eDzfkaBF2/NdWKjLGCqicn1IQhPIkbnDyQHbF1kc/6MnJcwoEVaAEwcvpbb"
    "OLhPd/TRIgDxHqQjdvAWrTrrRBQalCIRxHu4dvfyI7mbQalJle7FRfx7opgmnRz03gnvJX5okyv4xjoNAd9cp8124HdpAvXQ"
    "uFZJLalkXtcYehUuW8w+7/AvjBC3iBtEiRgjHscUjafIXGae1vVvPqmoyMkjT54oV4jlpfN7WZ5P59MfeZeFbQ==",
    "eNpdUc1OAjEQ7i4rePAZDOmZw4JmQ9YD+hzGkMIWqGm7pO2qSLj6Lr6FiS/l0Zl2QGI30++bv29m04wx9pExNs4Z2/Nlqztj"
    "59Iu20bZtef18JHbRjgndnw05D64ubIBKQEla3BvJhh49q09T6x0KyBVx+RiF6RHEqPVLdIOWqckzp8AaQkrjEwLCBuHL9Q6"
    "Dm7SHXWMDAJxK5RDdOI1Si1bJyMxQmskQb6Fc3Wv3pO67bQeDdM9PZJ/LpBx4knBbJ30XsGP1lTBV60zIoDPTdpsI/wmTcAe"
    "HDfXyigsqcoSQi/SkcTkcAevMAC7BrsE64NdgT0UGI0nI8wJe4QF4QVhn3BcxnMqGxxFcmouqAkb9hz3qA6Mfd2DO2NZ3itI"
    "8WfW//78+34B38WEgw==",
]

NUMBERS = [*range(3), *range(6, 7)]


@pytest.fixture
def files(tmp_path: Path) -> str:
    for number, content in enumerate(SHARDS):
        (tmp_path / f"shard.{number:05}.mds").write_bytes(zlib.decompress(b64decode(content)))
    return str(tmp_path)


def row(n: int) -> dict[str, object]:
    return {
        "any": list(map(float, range(n + 1))), "big": 10**n, "id": n - 3, "ids": list(range(n + 1)),
        "meta": f'{{"n": {n}}}', "pair": [n, 0.5], "raw": bytes(range(n)), "score": n / 4, "small": n,
        "text": "é" * n,
    }  # fmt: skip


def test_rows_are_those_that_were_written(files: str) -> None:
    rows = tp.read_files(files, example("mds").MosaicShards())
    assert [dict(each) for each in rows] == [row(n) for n in NUMBERS]


def test_columns_are_chosen(files: str) -> None:
    rows = tp.read_files(files, example("mds").MosaicShards(), columns=["text", "id"])
    assert [dict(each) for each in rows] == [{"text": "é" * n, "id": n - 3} for n in NUMBERS]


def test_a_resume_is_exact(files: str) -> None:
    shards = example("mds").MosaicShards()
    pipe = tp.read_files(files, shards, columns=["id"]).sharding_filter(2).shuffle(2).batch(2)
    check_resume(pipe, processes=0)


def test_a_shard_that_is_cut_is_named(files: str) -> None:
    path = Path(files, "shard.00000.mds")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(tp.UnreadableError, match=r"shard\.00000\.mds.*the shard ends early"):
        list(tp.read_files(files, example("mds").MosaicShards()))
