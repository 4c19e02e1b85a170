"""FBGEMM's training class on top of our module: its arguments, attributes, methods and `state_dict`.

It holds a `TableBatchedEmbeddingBags` and translates; everything that computes is there. docs/migration.md says of
every argument and method whether it is the same, better or refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fbtriton import fbgemm_state
from fbtriton.bounds_messages import BoundsMessages
from fbtriton.enums import (
    BoundsCheckMode,
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    OptimType,
    PoolingMode,
    SparseType,
    WeightDecayMode,
    member_of,
)
from fbtriton.fbgemm_arguments import (
    OptimizerArgs,
    bounds_check_of,
    float_dtype,
    make_optimizer,
    place_tables,
    refuse,
    refuse_extra_optimizer_config,
    state_dtypes_of,
    warn_of_unused,
)
from fbtriton.fbgemm_caches import WithoutCaches
from fbtriton.fbgemm_inputs import check_vbe_output, without_some_gradients, write_vbe_output
from fbtriton.fbgemm_names import Bags, FbgemmNames

__all__ = [
    "BoundsCheckMode",
    "CacheAlgorithm",
    "ComputeDevice",
    "EmbOptimType",
    "EmbeddingLocation",
    "OptimType",
    "PoolingMode",
    "SparseType",
    "SplitTableBatchedEmbeddingBagsCodegen",
    "WeightDecayMode",
]

POOLINGS = {PoolingMode.SUM: "sum", PoolingMode.MEAN: "mean", PoolingMode.NONE: "none"}
UPDATABLE = ("lr", "eps", "beta1", "beta2", "weight_decay", "lower_bound")


class SplitTableBatchedEmbeddingBagsCodegen(WithoutCaches, FbgemmNames):
    """FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen` for tables in device memory, or in host memory for a CPU.

    Arguments are FBGEMM's, in its order; enumerations may be FBGEMM's or ours. What an unsupported argument would
    change is never ignored: it raises an error with the argument's name. Those that only concern caches, unified memory
    or monitoring have no effect. docs/migration.md goes through all of them.

    Args:
        embedding_specs: for each table (rows, dim, EmbeddingLocation, ComputeDevice): DEVICE with CUDA, or HOST with
            CPU, whose tensors run the PyTorch reference. Any dim >= 1.
        feature_table_map: the table of each feature; default one feature for each table. Features may share a table.
        weights_precision, output_dtype: FP32, FP16 or BF16.
        optimizer: EXACT_SGD, LARS_SGD, EXACT_ADAGRAD, EXACT_ROWWISE_ADAGRAD, ADAM, PARTIAL_ROWWISE_ADAM, LAMB,
            PARTIAL_ROWWISE_LAMB, or NONE, which gives `weights_dev` (or `weights_host`) a sparse gradient.
        stochastic_rounding: of updated FP16 and BF16 rows.
        learning_rate, eps, weight_decay, ...: the optimizer's numbers, read where the optimizer has them.
        pooling_mode: SUM, MEAN, or NONE: a row of the output for every id, for tables of one dim.
        device: default the current CUDA device, or the CPU for ComputeDevice.CPU; "meta" allocates nothing.
        bounds_check_mode: WARNING counts and repairs, IGNORE repairs, FATAL stops, NONE promises valid input.
        table_names: shown in messages.
        managed_as_device: place tables of location MANAGED and MANAGED_CACHING in device memory; else they are refused.
        initial_accumulator_value: the accumulators of both Adagrads at the start.
        fused_bounds_check, bag_size_hints, frozen_tables: see `TableBatchedEmbeddingBags`.

    Weights start at zero. The same inputs give bitwise the same weights on every run.

    Raises:
        ValueError: an argument is out of range.
        NotImplementedError: an argument asks for what does not exist here.
    """

    def __init__(
        self,
        embedding_specs: list[tuple[int, int, Any, Any]],
        feature_table_map: list[int] | None = None,
        cache_algorithm: Any = CacheAlgorithm.LRU,
        cache_load_factor: float = 0.2,
        cache_sets: int = 0,
        cache_reserved_memory: float = 0.0,
        cache_precision: Any = None,
        weights_precision: Any = SparseType.FP32,
        output_dtype: Any = SparseType.FP32,
        enforce_hbm: bool = False,
        optimizer: Any = EmbOptimType.EXACT_SGD,
        record_cache_metrics: Any = None,
        gather_uvm_cache_stats: bool | None = False,
        stochastic_rounding: bool = True,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        max_norm: float = 0.0,
        learning_rate: float = 0.01,
        eps: float = 1.0e-8,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        weight_decay_mode: Any = WeightDecayMode.NONE,
        eta: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        ensemble_mode: Any = None,
        emainplace_mode: Any = None,
        counter_based_regularization: Any = None,
        cowclip_regularization: Any = None,
        pooling_mode: Any = PoolingMode.SUM,
        device: str | int | torch.device | None = None,
        bounds_check_mode: Any = BoundsCheckMode.WARNING,
        uvm_non_rowwise_momentum: bool = False,
        use_experimental_tbe: bool = False,
        prefetch_pipeline: bool = False,
        stats_reporter_config: Any = None,
        table_names: list[str] | None = None,
        optimizer_state_dtypes: dict[str, Any] | None = None,
        multipass_prefetch_config: Any = None,
        global_weight_decay: Any = None,
        uvm_host_mapped: bool = False,
        extra_optimizer_config: Any = None,
        tbe_input_multiplexer_config: Any = None,
        embedding_table_index_type: torch.dtype = torch.int64,
        embedding_table_offset_type: torch.dtype = torch.int64,
        embedding_shard_info: list[tuple[int, int, int, int]] | None = None,
        enable_raw_embedding_streaming: bool = False,
        res_params: Any = None,
        is_qr_tbe: bool = False,
        preallocated_host_buffers: dict[str, Tensor] | None = None,
        *,
        ar_alpha: float = 0.0,
        ema_beta: float = 0.99,
        min_shrinkage: float = 0.1,
        managed_as_device: bool = False,
        initial_accumulator_value: float = 0.0,
        fused_bounds_check: bool = True,
        bag_size_hints: Sequence[float] | None = None,
        frozen_tables: Sequence[int] = (),
    ) -> None:
        super().__init__()
        refuse(
            ensemble_mode=(ensemble_mode, None),
            emainplace_mode=(emainplace_mode, None),
            counter_based_regularization=(counter_based_regularization, None),
            cowclip_regularization=(cowclip_regularization, None),
            global_weight_decay=(global_weight_decay, None),
            enable_raw_embedding_streaming=(enable_raw_embedding_streaming, False),
            is_qr_tbe=(is_qr_tbe, False),
            preallocated_host_buffers=(preallocated_host_buffers, None),
            uvm_non_rowwise_momentum=(uvm_non_rowwise_momentum and not managed_as_device, False),
        )
        refuse_extra_optimizer_config(extra_optimizer_config)
        for name, dtype in (
            ("embedding_table_index_type", embedding_table_index_type),
            ("embedding_table_offset_type", embedding_table_offset_type),
        ):
            if dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{name} must be torch.int32 or torch.int64, got {dtype}")
        placement = place_tables(embedding_specs, table_names, device, managed_as_device)
        pooling = member_of(PoolingMode, "pooling_mode", pooling_mode)
        self.optimizer = optimizer
        self._kind = member_of(EmbOptimType, "optimizer", optimizer)
        self.optimizer_args = OptimizerArgs(
            stochastic_rounding=stochastic_rounding,
            gradient_clipping=gradient_clipping,
            max_gradient=max_gradient,
            max_norm=max_norm,
            eps=eps,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            weight_decay_mode=member_of(WeightDecayMode, "weight_decay_mode", weight_decay_mode).value,
            eta=eta,
            momentum=momentum,
        )
        self._start = (initial_accumulator_value, state_dtypes_of(self._kind, optimizer_state_dtypes))
        made = make_optimizer(self._kind, learning_rate, self.optimizer_args, *self._start)
        warn_of_unused(self._kind, self.optimizer_args)
        bounds_check, self.bounds_check_version = bounds_check_of(bounds_check_mode)
        self.bags = Bags(
            placement.tables,
            optimizer=made,
            feature_table_map=feature_table_map,
            pooling=POOLINGS[pooling],
            weights_dtype=float_dtype("weights_precision", weights_precision),
            output_dtype=float_dtype("output_dtype", output_dtype),
            stochastic_rounding=stochastic_rounding,
            bounds_check=bounds_check,
            fused_bounds_check=fused_bounds_check,
            bag_size_hints=bag_size_hints,
            frozen_tables=frozen_tables,
            device=placement.device,
        )
        self.learning_rate_tensor = torch.tensor(learning_rate, dtype=torch.float32, device="cpu")
        self.embedding_specs = placement.specs
        self.table_names = table_names
        self.logging_table_name = self.get_table_name_for_logging(table_names)
        self.pooling_mode = pooling_mode
        self.weights_precision = weights_precision
        self.stochastic_rounding = stochastic_rounding
        self.weight_decay_mode = weight_decay_mode
        self.prefetch_pipeline = prefetch_pipeline
        self.gather_uvm_cache_stats = bool(gather_uvm_cache_stats)
        self.embedding_table_index_type = embedding_table_index_type
        self.embedding_table_offset_type = embedding_table_offset_type
        self.embedding_shard_info = embedding_shard_info
        self.bounds_check_mode_int = BoundsCheckMode[bounds_check_mode.name.removeprefix("V2_")].value
        self.uuid = str(uuid.uuid4())
        self.step = 0
        self._messages = BoundsMessages()
        self._describe(placement.place)

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        total_unique_indices: int | None = None,
        hash_zch_identities: Tensor | None = None,
        hash_zch_runtime_meta: Tensor | None = None,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> Tensor:
        """Pooled embeddings; the backward updates the rows in place.

        Args:
            indices: [N] int32 or int64, feature-major.
            offsets: [F * B + 1] int32 or int64; bag (f, b) holds indices[offsets[f * B + b]:offsets[f * B + b + 1]].
            per_sample_weights: [N] floating point, optional; differentiable.
            feature_requires_grad: [F] integers; where 0, the gradient of the feature's per-sample weights is zero.
                Tables are trained in any case; `freeze_tables` is for them.
            batch_size_per_feature_per_rank: [F][ranks] batch sizes, which may differ between features (VBE).
            vbe_output, vbe_output_offsets: where to write the output of VBE: a contiguous tensor of the output's dtype,
                and [ranks, F] int64 first elements in it. vbe_output is written in place and returned.
            total_unique_indices: with optimizer NONE the number of different rows in the batch; not given, the backward
                waits for the device to know it. Other optimizers do not read it.
            hash_zch_identities, hash_zch_runtime_meta: have no effect on the result.

        Returns:
            [B, sum of feature dims] of output_dtype; for VBE one dimension: rank by rank, feature by feature, sample by
            sample; with pooling mode NONE [N, dim].

        Raises, mutates: as `fbtriton.functional.table_batched_embedding_bags`. Does not wait for the device.
        """
        bags = self.bags
        batch_sizes, spec = batch_size_per_feature_per_rank, bags.spec
        check_vbe_output(vbe_output, vbe_output_offsets, batch_sizes, spec.torch_output_dtype)
        if feature_requires_grad is not None and per_sample_weights is not None:
            per_sample_weights = without_some_gradients(
                per_sample_weights, feature_requires_grad, offsets, batch_sizes, len(spec.feature_tables)
            )
        unique = total_unique_indices if self._kind is EmbOptimType.NONE else None
        output = bags.forward(
            indices, offsets, per_sample_weights, batch_sizes=batch_sizes, total_unique_indices=unique
        )
        if not torch.compiler.is_compiling():
            self.__dict__["step"] += 1  # nn.Module's setattr would cost a microsecond
            if spec.bounds_check == "warning":
                self._messages.after_forward(bags.bounds_check_report)
        if vbe_output is not None and vbe_output_offsets is not None and batch_sizes is not None:
            output = write_vbe_output(output, vbe_output, vbe_output_offsets, batch_sizes, spec.layout.feature_dims)
        return output

    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Fill every table with uniform numbers from [min_val, max_val), in place."""
        self.bags.init_uniform_(min_val, max_val)

    def get_learning_rate(self) -> float:
        """The learning rate of the next forward and its backward. Does not wait for the device."""
        return self.learning_rate_tensor.item()

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next forward and its backward; ValueError unless it is a finite number >= 0,
        NotImplementedError with optimizer NONE."""
        self._needs_optimizer("set_learning_rate")
        if lr != self.bags.optimizer.hyperparameters[0]:
            self.update_hyper_parameters({"lr": lr})

    def update_hyper_parameters(self, params_dict: dict[str, float]) -> None:
        """Set numbers of the optimizer for the next forward and its backward.

        Args:
            params_dict: any of "lr", "eps", "beta1", "beta2", "weight_decay" and "lower_bound"; as in FBGEMM those that
                the optimizer does not have are kept and have no effect.

        Raises:
            NotImplementedError: another name, or optimizer NONE. ValueError: a number is out of range. Then nothing is
                changed.
        """
        self._needs_optimizer("update_hyper_parameters")
        given: dict[str, Any] = dict(params_dict)
        for name in given:
            if name not in UPDATABLE:
                raise NotImplementedError(f"params_dict must have names of {', '.join(UPDATABLE)}, got {name!r}")
        lr = given.pop("lr", self.bags.optimizer.hyperparameters[0])
        given.pop("lower_bound", None)  # of global weight decay, which no optimizer here has
        args = self.optimizer_args._replace(**given)
        optimizer = make_optimizer(self._kind, lr, args, *self._start)
        for number, value in enumerate(optimizer.hyperparameters):
            if value != self.bags.optimizer.hyperparameters[number]:
                self.bags.hyperparameters[number] = value
        self.bags.optimizer, self.optimizer_args = optimizer, args
        self.learning_rate_tensor.fill_(lr)

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of steps done, in place: the t of Adam and LAMB, else the step of stochastic rounding.
        ValueError unless it is an integer >= 0, NotImplementedError with optimizer NONE."""
        self._needs_optimizer("set_optimizer_step")
        if step < 0 or int(step) != step:
            raise ValueError(f"step must be an integer >= 0, got {step!r}")
        self.iter[0] = step

    def prepare_inputs(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        force_cast_input_types: bool = True,
        prefetch_pipeline: bool = False,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, list[list[int]] | None]:
        """The inputs as given: the forward takes every dtype as it is, and checks bounds itself."""
        return indices, offsets, per_sample_weights, batch_size_per_feature_per_rank

    def reset_embedding_weight_momentum(
        self, pruned_indices: Tensor, pruned_indices_offsets: Tensor, logical_table_ids: Tensor, buffer_ids: Tensor
    ) -> None:
        """Set rows and their row-wise Adagrad state to zero, in place; does nothing for other optimizers. Waits for the
        device.

        Args:
            pruned_indices: row numbers, all lists one after the other.
            pruned_indices_offsets: list i is pruned_indices[pruned_indices_offsets[i]:pruned_indices_offsets[i + 1]].
            logical_table_ids, buffer_ids: one each for every list to reset: its feature, and its number i.
        """
        self._needs_optimizer("reset_embedding_weight_momentum")
        if self._kind is not EmbOptimType.EXACT_ROWWISE_ADAGRAD:
            return
        starts = pruned_indices_offsets.tolist()
        weights, states = self.split_embedding_weights(), self.split_optimizer_states()
        for feature, number in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
            table = self.feature_table_map[feature]
            rows = pruned_indices[starts[number] : starts[number + 1]].to(self.current_device, torch.int64)
            for view in (weights[table], *states[table]):
                view.index_fill_(0, rows, 0)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        fbgemm_state.save(self, destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        fbgemm_state.load(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def extra_repr(self) -> str:
        return f"optimizer={self._kind.name}, pooling_mode={self.pooling_mode.name}"
