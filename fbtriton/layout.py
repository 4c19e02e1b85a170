"""Where everything lies: tables in the flat weights, features in the output, rows in the key space.

The host side (`TableLayout`, `Bucket`) is plain immutable Python. The device side is the
NamedTuples that kernels take: they hold tensors and None only, so that launching with them costs no more than
with the flat list of pointers.

Worked example: tables A (3 rows, dim 4), B (2 rows, dim 1), C (5 rows, dim 4), fp32, features -> [A, B, C, A]:

    weight_offsets   A 0, B 12, C 16     elements; B's 2 elements are padded to 16 bytes
    state_bases      A 0, B 3, C 5       rows before the table
    columns          0, 4, 5, 9          first output column of each feature; 13 columns
    buckets          dim 1: table B, feature 1;  dim 4: tables A and C, features 0, 2 and 3
    key_bases        B 0, A 2, C 5       bucket by bucket, so the sorted keys of a bucket are one range
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ROW_ALIGNMENT_BYTES = 16  # the widest load of one lane
WIDEST = 16  # elements, of one byte. Alignments are powers of two: told 6, Triton would load 4 at a time


@dataclass(frozen=True)
class Table:
    """One embedding table.

    Args:
        rows: number of rows, at least 0.
        dim: elements in a row, at least 1; multiples of 4 are fast, others are correct.
        name: shown in messages.

    Raises:
        ValueError: rows or dim is not an integer in range.
    """

    rows: int
    dim: int
    name: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("rows", 0), ("dim", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} of table {self.name!r} must be an integer >= {least}, got {value!r}")


class FeatureTables(NamedTuple):
    """For each feature, where its table lies. Device tensors, all [F] int64."""

    rows: Tensor  # rows of the table
    weight_offset: Tensor  # element of the flat weights where the table starts
    column: Tensor  # first column of the feature in the output
    key_base: Tensor  # key of row 0 of the table, -1 if the table is frozen


class KeyTables(NamedTuple):
    """For each table in the order of the keys, how a key becomes a row. Device tensors, all [T] int64."""

    key_base: Tensor  # ascending; the table of a key is the last one with key_base <= key
    dim: Tensor  # of a row, in `row_unit`s
    weight_shift: Tensor  # weight_shift + key * dim is where the row starts in the flat weights, in `row_unit`s
    state_shift: Tensor  # state_shift + key is the row of row-wise optimizer state


class VbeLayout(NamedTuple):
    """Where bags lie if every feature has a batch size of its own. Device tensors.

    Example, two features of dims 4 and 2, batch sizes [[2, 1], [1, 1]] on two ranks; feature 1 is in the first bucket:

        first_bags       0, 3, 5
        bag_features     0, 0, 0, 1, 1
        output_offsets   0, 4, 10, 8, 14     rank 0 fills the elements 0 to 9, rank 1 those from 10 on
        bucket_bags      3, 4, 0, 1, 2
    """

    first_bags: Tensor  # [F + 1] int64; feature f owns the bags first_bags[f]:first_bags[f + 1]
    bag_features: Tensor  # [bags] int32
    output_offsets: Tensor  # [bags] int64; the bag's first element in the output
    bucket_bags: Tensor  # [bags] int32; the bags bucket by bucket


class Bags(NamedTuple):
    """The ids of a batch. Feature-major: bag f * B + b holds the ids of sample b in feature f."""

    indices: Tensor  # [N] int32 | int64
    offsets: Tensor  # [F * B + 1] int32 | int64; bag i owns indices[offsets[i]:offsets[i + 1]]
    sample_weights: Tensor | None  # [N] fp32; None = unweighted, compiled out
    vbe: VbeLayout | None = None  # None = every feature has B samples


class BoundsCheck(NamedTuple):
    """What the look at the offsets found. Device tensors, see `fbtriton.bounds_check`."""

    repaired: Tensor  # [F * B + 1]; the offsets, repaired unless one is bad
    bad: Tensor  # [chunks] int8; not 0 if an offset of the chunk is bad
    highest: Tensor  # [chunks] int64; the largest offset of the chunk, each kept in [0, N]
    ever_bad: Tensor  # [1] int64; not 0 if an offset was bad since the report was cleared
    sealed: Tensor  # [1] int64; not 0 if the report held a first bad id before this call


class Entries(NamedTuple):
    """Where each entry's gradient lies and what it is multiplied by; `fbtriton.backward.entries` has the forms."""

    payload: Tensor  # [N] int32 | int64, what the sort carries
    offsets: Tensor | None  # [N] int64, by entry
    scales: Tensor | None  # [N] fp32, by entry


class Runs(NamedTuple):
    """The sorted entries grouped by row. A run is all entries of one row.

    Example, keys of the entries [7, 2, 7, 9, 2] and three slots of padding, no_key 10, one table of 10 rows of dim 4:

        sorted keys        2 2 7 7 9 10 10 10
        run_starts         0, 2, 4, 5     run r owns the sorted entries run_starts[r]:run_starts[r + 1]
        weight_offsets     2, 7, 9        in units of 4 elements, which every row starts at a multiple of
        state_rows         2, 7, 9

    Entries that train nothing have the largest key and belong to no run. What lies past the last run is undefined.
    """

    run_starts: Tensor  # [R + 1] int32
    weight_offsets: Tensor  # [R] int32 | int64; where the run's row starts in the flat weights, in `row_unit`s
    state_rows: Tensor  # [R] int32 | int64; the run's row in row-wise optimizer state


class RowGradients(NamedTuple):
    """What the backward gives without an optimizer. Device tensors."""

    values: Tensor  # [R, dim] of the weights' dtype; the gradients of the rows
    rows: Tensor  # [R] int64, rows counted over all tables, ascending
    filled: Tensor  # [1] int64, how many of the R


class LongRuns(NamedTuple):
    """Runs of at least the threshold. They are cut into pieces, at multiples of the piece length that have at least
    threshold entries of the run on either side: whether a piece starts somewhere shows in three keys, wherever its run
    starts and ends.

    Example, threshold 3, pieces of 4, runs of 2, 9, 1 and 3 entries:

        runs            1, 3
        first_pieces    0, 2              the pieces have the sorted entries [2, 8), [8, 11) and [12, 15)
    """

    runs: Tensor  # [L] int32
    first_pieces: Tensor  # [L] int32; how many pieces earlier runs have


class RunTables(NamedTuple):
    """What the kernels that work on rows read. Bucket b owns the range ranges[b]:ranges[b + 1] of each table."""

    runs: Runs
    long_runs: LongRuns
    ranges: Tensor  # [(buckets + 1) * 3 or more] int32; runs, long runs and pieces of all earlier buckets


@dataclass(frozen=True, eq=False)
class Bucket:
    """Tables of one dim, of one layout."""

    dim: int
    features: tuple[int, ...]
    tables: tuple[int, ...]
    row_alignment: int  # elements; every row of the bucket starts at a multiple of it
    column_alignment: int  # columns; every feature's first column and the row length are multiples of it

    @property
    def block_dim(self) -> int:
        """Columns of a tile: the next power of two."""
        return 1 << (self.dim - 1).bit_length()

    def has_narrow_rows(self, itemsize: int) -> bool:
        """Whether rows cannot be loaded 16 bytes a lane."""
        return self.row_alignment * itemsize < ROW_ALIGNMENT_BYTES


def _narrowest(largest: int) -> torch.dtype:
    return torch.int32 if largest <= torch.iinfo(torch.int32).max else torch.int64


def _exclusive_sums(values: list[int]) -> list[int]:
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


@dataclass(frozen=True, eq=False)
class TableLayout:
    """Offsets of tables and features. All derived values are computed once and cached. Equal only to itself."""

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    feature_tables: tuple[int, ...]
    itemsize: int  # bytes of one weight
    frozen_tables: tuple[int, ...] = ()
    padded: bool = True  # False = tables, which then have one dim, lie back to back

    @property
    def table_alignment(self) -> int:
        """Elements; every table starts at a multiple of it."""
        unit = ROW_ALIGNMENT_BYTES // self.itemsize
        return unit if self.padded else math.gcd(unit, *self.dims)

    @functools.cached_property
    def weight_offsets(self) -> list[int]:
        """[T + 1] elements; each table starts at a multiple of 16 bytes, the last entry is the size of all."""
        unit = self.table_alignment
        sizes = [rows * dim for rows, dim in zip(self.rows, self.dims, strict=True)]
        return _exclusive_sums([-(-size // unit) * unit for size in sizes])

    @functools.cached_property
    def state_bases(self) -> list[int]:
        """[T + 1] rows before each table; the last entry is the number of all rows."""
        return _exclusive_sums(list(self.rows))

    @functools.cached_property
    def feature_dims(self) -> list[int]:
        """[F] elements in a row of each feature's table."""
        return [self.dims[table] for table in self.feature_tables]

    @functools.cached_property
    def columns(self) -> list[int]:
        """[F + 1] first output column of each feature; the last entry is the number of columns."""
        return _exclusive_sums(self.feature_dims)

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """One bucket for each distinct dim that a feature uses, ascending."""
        return tuple(self._bucket(dim) for dim in sorted(set(self.dims)))

    @functools.cached_property
    def block_dims(self) -> tuple[int, ...]:
        """Of each bucket."""
        return tuple(bucket.block_dim for bucket in self.buckets)

    def _bucket(self, dim: int) -> Bucket:
        features = tuple(f for f, table in enumerate(self.feature_tables) if self.dims[table] == dim)
        return Bucket(
            dim=dim,
            features=features,
            tables=tuple(table for table, table_dim in enumerate(self.dims) if table_dim == dim),
            row_alignment=math.gcd(dim, self.table_alignment),
            column_alignment=math.gcd(WIDEST, self.columns[-1], *(self.columns[f] for f in features)),
        )

    @property
    def dim_alignment(self) -> int:
        """Elements; every bag's place in the output of batch sizes for each feature is a multiple of it."""
        return math.gcd(WIDEST, *self.dims)

    @functools.cached_property
    def key_order(self) -> list[int]:
        """[T] the tables in the order of their keys: bucket by bucket."""
        return [table for bucket in self.buckets for table in bucket.tables]

    @functools.cached_property
    def key_bases(self) -> list[int]:
        """[T] key of row 0 of each table."""
        bases = _exclusive_sums([self.rows[table] for table in self.key_order])
        by_table = dict(zip(self.key_order, bases, strict=False))
        return [by_table[table] for table in range(len(self.rows))]

    @functools.cached_property
    def row_unit(self) -> int:
        """Elements; every row starts at a multiple of it."""
        return math.gcd(*(bucket.row_alignment for bucket in self.buckets))

    @property
    def offset_dtype(self) -> torch.dtype:
        """Of the place of a row in the flat weights, in units of `row_unit`."""
        return _narrowest(self.weight_offsets[-1] // self.row_unit)

    @property
    def no_key(self) -> int:
        """The key of entries that train nothing: one past the last row's."""
        return self.state_bases[-1]

    @property
    def key_dtype(self) -> torch.dtype:
        return _narrowest(self.no_key)

    @functools.cache  # noqa: B019  (layouts are few and live as long as the process)
    def numbers_on_device(self, numbers: tuple[int, ...], device: torch.device) -> Tensor:
        """[n] int64, such as a choice of features. Copies on the first call, as `on_device` does."""
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    @functools.cache  # noqa: B019  (layouts are few and live as long as the process)
    def sorted_features(self, left_out: tuple[int, ...], device: torch.device) -> FeatureTables:
        """All features, those in left_out as if their tables were frozen. Copies on the first call."""
        features = self.on_device(device).features
        if not left_out:
            return features
        key_base = features.key_base.clone()
        key_base[self.numbers_on_device(left_out, device)] = -1
        return features._replace(key_base=key_base)

    @functools.cache  # noqa: B019  (layouts are few and live as long as the process)
    def on_device(self, device: torch.device) -> DeviceLayout:
        """The layout as device tensors. Copies on the first call for a device, so call it before a capture."""

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def per_feature(values: list[int]) -> Tensor:
            return tensor([values[table] for table in self.feature_tables])

        def per_key_table(values: list[int]) -> Tensor:
            return tensor([values[table] for table in self.key_order])

        bucket_rows = [sum(self.rows[table] for table in bucket.tables) for bucket in self.buckets]
        keys, dims = self.key_bases, [dim // self.row_unit for dim in self.dims]
        starts = [offset // self.row_unit for offset in self.weight_offsets]
        return DeviceLayout(
            features=FeatureTables(
                rows=per_feature(list(self.rows)),
                weight_offset=per_feature(self.weight_offsets),
                column=tensor(self.columns[:-1]),
                key_base=per_feature([-1 if t in self.frozen_tables else key for t, key in enumerate(self.key_bases)]),
            ),
            key_tables=KeyTables(
                key_base=per_key_table(keys),
                dim=per_key_table(dims),
                weight_shift=per_key_table([start - key * dim for start, key, dim in zip(starts, keys, dims)]),
                state_shift=per_key_table([start - key for start, key in zip(self.state_bases, keys)]),
            ),
            bucket_features=tuple(self.numbers_on_device(bucket.features, device) for bucket in self.buckets),
            bucket_keys=tensor(_exclusive_sums(bucket_rows)),
        )


@dataclass(frozen=True)
class DeviceLayout:
    """The device tensors of a `TableLayout`."""

    features: FeatureTables
    key_tables: KeyTables
    bucket_features: tuple[Tensor, ...]  # for each bucket [n] int64, its features
    bucket_keys: Tensor  # [buckets + 1] int64; bucket b owns the keys bucket_keys[b]:bucket_keys[b + 1]
