"""What ``read_json``, ``read_csv`` and ``read_text`` share: what they open."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from trainpipes._internal.checks import byte_count, require
from trainpipes.kinds.stage import Stage
from trainpipes.sources.files.file_reader import FileReader
from trainpipes.sources.files.file_rows import suffixes_of
from trainpipes.sources.text.blocks import BlockSource
from trainpipes.sources.text.format import MOST_ROW_BYTES, TextFormat


class TextReader(FileReader):
    """A stage that reads rows of text.

    A class below this one has the options ``block_rows``, ``max_row_bytes``, ``errors``, ``index`` and
    ``storage_options``; and ``columns``, ``schema`` and ``infer`` if the rows of its format say which columns
    they have.
    """

    has_blocks = True
    free = FileReader.free | {"max_row_bytes"}

    def check(self) -> None:
        super().check()
        option = f"{self.name}(max_row_bytes)"
        rule = f"a number of bytes up to {MOST_ROW_BYTES:,}, which Arrow holds in a text"
        require(self.most_row_bytes <= MOST_ROW_BYTES, option, rule, self.options["max_row_bytes"])

    @property
    def most_row_bytes(self) -> int:
        """Bytes of a row at most."""
        return byte_count(self.options["max_row_bytes"], f"{self.name}(max_row_bytes)")

    @property
    @abstractmethod
    def form(self) -> TextFormat:
        """The format of the files."""

    def open_files(self, files: Sequence[Stage]) -> BlockSource:
        """The rows of the files that the stages below list and let through."""
        form, given = self.form, self.options
        return BlockSource(
            self.listed(files, suffixes_of(self.name)),
            form,
            columns=given.get("columns"),
            schema=given.get("schema"),
            infer=given.get("infer", "first"),
            block_rows=given["block_rows"],
            asker=str(self),
            index=given["index"],
            replace=given["errors"] == "replace",
        )
