"""The format that a file name implies: `rows.csv.gz` is CSV, compressed with gzip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError, nearest

Kind = Literal["jsonl", "csv", "tsv", "parquet"]
Compression = Literal["gz", "zst"]

_KINDS: dict[str, Kind] = {
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
    "csv": "csv",
    "tsv": "tsv",
    "parquet": "parquet",
    "pq": "parquet",
}
_COMPRESSIONS: dict[str, Compression] = {"gz": "gz", "gzip": "gz", "zst": "zst", "zstd": "zst"}
# Names of other formats. A file of another name is JSON lines, but under these names nobody expects it.
_OTHERS = frozenset(
    (
        *("xlsx", "xls", "xlsm", "ods", "docx", "pdf", "html", "xml", "yaml", "yml"),
        *("arrow", "feather", "orc", "avro", "h5", "hdf5", "npy", "npz", "pkl", "pickle"),
        *("db", "sqlite", "sqlite3", "duckdb", "zip", "7z", "rar", "tar", "tgz", "bz2", "xz", "lz4", "br", "sz"),
    )
)
FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "csv", "csv.gz", "csv.zst", "tsv", "tsv.gz", "tsv.zst", "parquet")


@dataclass(frozen=True, slots=True)
class Format:
    kind: Kind = "jsonl"
    compression: Compression | None = None

    @property
    def is_table(self) -> bool:
        return self.kind != "jsonl"

    def __str__(self) -> str:
        return f"{self.kind}.{self.compression}" if self.compression else self.kind


def format_of(path: str, given: str | None = None) -> Format:
    """The given format, else that of the name's suffixes, else JSON lines; a name of another format is refused."""
    if given is not None and given not in FORMATS:
        raise ConfigError(f"unknown format {given!r}{nearest(given, FORMATS) or '; known are ' + ', '.join(FORMATS)}")
    *_, before, last = ["", "", *(given or path.rpartition("/")[2]).lower().split(".")]
    compression = _COMPRESSIONS.get(last)
    if (suffix := before if compression else last) in _OTHERS:
        raise ConfigError(
            f"{path}: .{suffix} is not supported; known are {', '.join(FORMATS)}. If the file has one of these "
            "formats, name it with --input-format or --output-format"
        )
    kind = _KINDS.get(before if compression else last, "jsonl")
    if kind == "parquet" and compression:
        raise ConfigError(f"{path}: Parquet is compressed inside; decompress the .parquet.{compression} first")
    return Format(kind, compression)
