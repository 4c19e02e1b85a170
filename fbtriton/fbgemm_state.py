"""`state_dict` of FBGEMM's class.

It has exactly FBGEMM's keys, with the tables one after the other without padding, so that each library loads the
other's. What FBGEMM has no key for, the seed and step of stochastic rounding, travels in the metadata that PyTorch
keeps beside a `state_dict`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fbtriton.enums import EmbeddingLocation
from fbtriton.fbgemm_names import FbgemmNames

PLACES = ("dev", "host", "uvm")
MEMORIES = {EmbeddingLocation.DEVICE: 0, EmbeddingLocation.HOST: 1}  # all others lie in unified memory
SAME_TABLES = ("D_offsets", "rows_per_table", "hash_size_cumsum")  # differ if the tables do
# FBGEMM 1.6 saves what it streams rows through, later releases do not. There is nothing in it.
STREAMING = ("res_indices", "res_weights", "res_identities", "res_runtime_meta", "res_count", "res_copy_done")
METADATA = "fbtriton_seed_and_step"


def _without_padding(views: list[Tensor], flat: Tensor) -> Tensor:
    """All tables one after the other: the flat tensor itself if it has no padding."""
    if flat.numel() == sum(view.numel() for view in views):
        return flat
    return torch.cat([view.flatten() for view in views])


def saved_tensors(module: FbgemmNames) -> dict[str, Tensor]:
    """What `state_dict` has, under FBGEMM's keys."""
    names = ["placeholder_autograd_tensor", *SAME_TABLES, "bounds_check_warning", "feature_dims"]
    names += ["table_wise_cache_miss", "lxu_cache_weights", *["iter"] * module.bags.optimizer.counts_iterations]
    tensors: dict[str, Tensor] = {name: getattr(module, name) for name in names}
    for prefix in module.prefixes:
        views = module.views_of(prefix)
        flat = _without_padding(views, getattr(module, f"{prefix}_{module.place}"))
        for place in PLACES:
            tensors[f"{prefix}_{place}"] = flat if place == module.place else flat.new_empty(0)
        starts = [0]
        for view in views:
            starts.append(starts[-1] + view.numel())
        offsets = [starts[table] for table in module.feature_table_map]
        tensors[f"{prefix}_offsets"] = module.rows_per_table.new_tensor(offsets)
        tensors[f"{prefix}_placements"] = getattr(module, f"{prefix}_placements")
    return tensors


def save(module: FbgemmNames, destination: Any, prefix: str, keep_vars: bool) -> None:
    """Fill `destination`, as nn.Module._save_to_state_dict. Waits for the device, for seed and step."""
    for name, tensor in saved_tensors(module).items():
        destination[prefix + name] = tensor if keep_vars else tensor.detach()
    metadata = getattr(destination, "_metadata", None)
    if metadata is not None and not module.bags.seed_and_step.is_meta:
        metadata[prefix[:-1]][METADATA] = module.bags.seed_and_step.tolist()


def load(
    module: FbgemmNames, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
    missing: list[str], unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """Read `state_dict`, ours or FBGEMM's, as nn.Module._load_from_state_dict: tables may lie in any of FBGEMM's kinds
    of memory there. Writes weights and states in place, and nothing if the tables differ."""
    expected = saved_tensors(module)
    given = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    if strict:
        missing += [prefix + name for name in expected if name not in given]
        unexpected += [prefix + name for name in given if name not in expected and name not in STREAMING]
    if module.bags.weights.is_meta:
        errors.append(f"{prefix}weights are on the meta device; give them memory first, with to_empty(device=...)")
        return
    for name in SAME_TABLES:
        if name in given and given[name].tolist() != expected[name].tolist():
            errors.append(f"tables differ: {prefix}{name} is {given[name].tolist()}, here {expected[name].tolist()}")
            return
    for kind in module.prefixes:
        names = [f"{kind}_{part}" for part in (*PLACES, "placements", "offsets")]
        if all(name in given for name in names):
            errors += _load_tables(module, kind, [given[name] for name in names], prefix)
    if "iter" in expected and "iter" in given:
        if given["iter"].numel() == 1:
            module.iter.fill_(int(given["iter"]))
        else:
            errors.append(f"size mismatch for {prefix}iter: expected one number, got {list(given['iter'].shape)}")
    seed_and_step = local_metadata.get(METADATA)
    if seed_and_step is not None:
        module.bags.seed_and_step.copy_(torch.tensor(seed_and_step))


def _load_tables(module: FbgemmNames, kind: str, given: list[Tensor], prefix: str) -> list[str]:
    """Copy each table from where it lies; what does not fit is returned as errors."""
    memories, (placements, offsets) = given[:3], (tensor.tolist() for tensor in given[3:])
    errors = []
    with torch.no_grad():
        for table, view in enumerate(module.views_of(kind)):
            feature = module.feature_table_map.index(table)
            memory = MEMORIES.get(EmbeddingLocation(placements[feature]), 2)
            start = offsets[feature]
            part = memories[memory].detach().flatten()[start : start + view.numel()]
            if part.numel() == view.numel():
                view.copy_(part.view_as(view))
                continue
            errors.append(
                f"size mismatch for {prefix}{kind}_{PLACES[memory]}: table {table} needs {view.numel()} elements from"
                f" {start} on, got {part.numel()}"
            )
    return errors
