"""Every key of DeepSpeed's configuration (0.19), and what becomes of it."""

from __future__ import annotations

from ringcomm.extras.migrate.keys import MAPPED, NO_EFFECT, OFF, UNSUPPORTED, Key

_ZERO = "zero_optimization."
_TRAINER = "it says what DeepSpeed's engine prints or measures; "
_ADAM = "optimizer.params."
_SCHEDULE = "scheduler.params."
_HOLDS = "a schedule's parameter; the scheduler has the same rates at each step"

_BATCHES = (
    Key(
        "train_batch_size",
        MAPPED,
        "`train_batch_size`, checked: micro batch x accumulation steps x ranks",
    ),
    Key("train_micro_batch_size_per_gpu", MAPPED, "`micro_batch_size`"),
    Key(
        "gradient_accumulation_steps",
        MAPPED,
        "`accumulation_steps`: divide each loss by it, as DeepSpeed's `backward()` does, and run "
        "all backwards of a step but the last under `zero.no_sync`",
    ),
    Key(
        "managed_gradient_accumulation",
        NO_EFFECT,
        "a step is where the loop calls `optimizer.step()`",
    ),
    Key("dataloader_drop_last", NO_EFFECT, "the loop builds its own `DataLoader`; pass it there"),
    Key(
        "gradient_clipping",
        MAPPED,
        "`clip`, for `optimizer.clip_grad_norm_()`; 0 is None, and so is no key, where DeepSpeed "
        "0.19.8 clips at 1.0",
    ),
    Key(
        "sequence_parallel_size",
        UNSUPPORTED,
        "`ringcomm.functional.ring_attention` and `ulysses_attention` divide sequences; call them "
        "in the model, and leave the key away",
        off=(*OFF, 0, 1),
    ),
)

_OPTIMIZERS = (
    Key(
        "optimizer.type",
        MAPPED,
        '"Adam", "AdamW", "SGD", "Lion", "Adagrad": `build_optimizer()`; others raise '
        "`UnsupportedError` with a reason",
    ),
    Key(_ADAM + "lr", MAPPED, "`lr`"),
    Key(_ADAM + "betas", MAPPED, "`betas`"),
    Key(_ADAM + "eps", MAPPED, "`eps`"),
    Key(
        _ADAM + "weight_decay",
        MAPPED,
        "`weight_decay`; 0 if missing, but 0.01 with `torch_adam` and decoupled decay, as in torch",
    ),
    Key(_ADAM + "amsgrad", MAPPED, "`amsgrad`"),
    Key(_ADAM + "momentum", MAPPED, '`momentum` of "SGD"'),
    Key(_ADAM + "dampening", MAPPED, '`dampening` of "SGD"'),
    Key(_ADAM + "nesterov", MAPPED, '`nesterov` of "SGD"'),
    Key(
        _ADAM + "adam_w_mode",
        MAPPED,
        '`AdamW` if true, the default, and `Adam` with decay in the gradient if false; "AdamW" '
        "is `AdamW` either way",
    ),
    Key(_ADAM + "torch_adam", MAPPED, "the default of `weight_decay`; the step is ringcomm's"),
    Key(
        _ADAM + "bias_correction",
        UNSUPPORTED,
        "the bias of the moments is always corrected; leave the key away, or true",
        off=(True,),
    ),
    Key(_ADAM + "set_grad_none", NO_EFFECT, "`optimizer.zero_grad(set_to_none=)` says it"),
    Key(_ADAM + "fp32_optimizer_states", NO_EFFECT, "moments are FP32"),
    Key(
        _ADAM + "max_grad_norm",
        UNSUPPORTED,
        "DeepSpeed refuses it as well; put it into `gradient_clipping`",
        off=(*OFF, 0, 0.0),
    ),
    Key("optimizer.legacy_fusion", NO_EFFECT, "the step is one kernel"),
    Key("zero_allow_untested_optimizer", NO_EFFECT, "ringcomm's optimizers are tested with it"),
    Key("zero_force_ds_cpu_optimizer", NO_EFFECT, "the step runs where the parameters are"),
    Key(
        "scheduler.type",
        MAPPED,
        '`build_scheduler()`: "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", '
        '"LRRangeTest"; call its `step()` after each step that was not skipped',
    ),
    *(
        Key(_SCHEDULE + name, MAPPED, _HOLDS)
        for name in (
            "total_num_steps",
            "warmup_min_lr",
            "warmup_max_lr",
            "warmup_num_steps",
            "warmup_type",
            "warmup_min_ratio",
            "cos_min_ratio",
            "cycle_min_lr",
            "cycle_max_lr",
            "decay_lr_rate",
            "cycle_first_step_size",
            "cycle_second_step_size",
            "cycle_first_stair_count",
            "cycle_second_stair_count",
            "decay_step_size",
            "cycle_momentum",
            "cycle_min_mom",
            "cycle_max_mom",
            "decay_mom_rate",
            "lr_range_test_min_lr",
            "lr_range_test_step_size",
            "lr_range_test_step_rate",
            "lr_range_test_staircase",
        )
    ),
    Key(
        _SCHEDULE + "last_batch_iteration",
        UNSUPPORTED,
        "a schedule goes on by its `load_state_dict()`",
        off=(*OFF, -1),
    ),
)

_PRECISION = (
    Key(
        "fp16.enabled",
        MAPPED,
        "`Precision(param=torch.float16, scaled=True)` with FP32 masters, and "
        "`build_loss_scaler()`",
    ),
    Key("fp16.auto_cast", MAPPED, "`Precision.cast_inputs`; false if missing"),
    Key("fp16.loss_scale", MAPPED, "0: a scale that adapts; else a scale that stays"),
    Key("fp16.initial_scale_power", MAPPED, "`LossScaleOptions.init_scale`, 2 to its power"),
    Key(
        "fp16.loss_scale_window",
        MAPPED,
        "`LossScaleOptions.growth_interval`; DeepSpeed's first growth, and that after an overflow, "
        "comes one step later",
    ),
    Key("fp16.hysteresis", MAPPED, "`LossScaleOptions.hysteresis`"),
    Key(
        "fp16.consecutive_hysteresis",
        UNSUPPORTED,
        "hysteresis is refilled when the scale grows; leave the key away",
    ),
    Key(
        "fp16.min_loss_scale",
        MAPPED,
        "`LossScaleOptions.min_scale`, at which steps that overflow are skipped; DeepSpeed ends "
        "the run",
    ),
    Key(
        "fp16.fp16_master_weights_and_grads",
        UNSUPPORTED,
        'masters of FP16 parameters are FP32; `Precision.preset("bf16-pure-sr")` keeps none',
    ),
    Key(
        "bf16.enabled",
        MAPPED,
        "`Precision(param=torch.bfloat16)` with FP32 masters, which start from the values before "
        "the cast; inputs are not cast; `check_finite` as of `bf16.check_grad_overflow`",
    ),
    Key("bf16.check_grad_overflow", MAPPED, "`AdamWOptions.check_finite`; true if missing"),
    Key(
        "bf16.immediate_grad_update",
        NO_EFFECT,
        "stages 2 and 3 reduce a gradient while backward goes on",
    ),
    Key(
        "bf16.bf16_master_weights_and_grads",
        UNSUPPORTED,
        "without FP32 masters steps must be rounded stochastically; "
        '`Precision.preset("bf16-pure-sr")`',
    ),
    Key("bf16.bf16_optimizer_states", UNSUPPORTED, "moments are FP32; leave the key away"),
    Key(
        "amp",
        UNSUPPORTED,
        "Apex is not used; enable `bf16` or `fp16`, or run the forward under `torch.autocast`",
        whole=True,
        switch="enabled",
    ),
    Key(
        "torch_autocast",
        UNSUPPORTED,
        "run the forward under `torch.autocast` yourself, with FP32 parameters",
        whole=True,
        switch="enabled",
    ),
    Key(
        "data_types.grad_accum_dtype",
        MAPPED,
        "fp32: `AdamWOptions.accumulate_dtype`; the parameters' 16-bit dtype: `Precision.reduce`",
    ),
    Key("data_types.param_dtype", MAPPED, "checked: it must be what `fp16` or `bf16` enables"),
    Key("data_types.buffer_dtype", MAPPED, "`Precision.buffer`"),
)

_ZERO_KEYS = (
    Key(_ZERO + "stage", MAPPED, "`stage`"),
    Key(_ZERO + "reduce_bucket_size", MAPPED, "`ZeroOptions.bucket_elems`, if below the default"),
    Key(_ZERO + "overlap_comm", MAPPED, "`ZeroOptions.overlap`"),
    Key(
        _ZERO + "stage3_prefetch_bucket_size",
        MAPPED,
        "`ZeroOptions.prefetch`, in units: 0 if it is 0, else 1",
    ),
    Key(
        _ZERO + "zero_hpz_partition_size",
        MAPPED,
        '`ZeroOptions(params="node")` if above 1: a node has a copy of the parameters; else '
        '`params="world"` at stage 3, as DeepSpeed shards them',
    ),
    Key(
        _ZERO + "zero_quantized_weights",
        MAPPED,
        '`ZeroOptions(wire=Wire(parameters="int8"))` at stage 3, and nothing below, as in '
        "DeepSpeed; between nodes alone",
    ),
    Key(_ZERO + "contiguous_gradients", NO_EFFECT, "gradients move into buckets as they come"),
    Key(_ZERO + "grad_hooks", NO_EFFECT, "hooks tell when gradients come"),
    Key(_ZERO + "reduce_scatter", NO_EFFECT, "the sums are the same"),
    Key(_ZERO + "use_multi_rank_bucket_allreduce", NO_EFFECT, "each rank reduces what it owns"),
    Key(_ZERO + "allgather_partitions", NO_EFFECT, "each rank reads its peers' parameters"),
    Key(_ZERO + "allgather_bucket_size", NO_EFFECT, "parameters are gathered in place"),
    Key(
        _ZERO + "load_from_fp32_weights",
        NO_EFFECT,
        "`zero.load` reads masters where there are some",
    ),
    Key(_ZERO + "elastic_checkpoint", NO_EFFECT, "a checkpoint loads into any number of ranks"),
    *(
        Key(
            _ZERO + name,
            UNSUPPORTED,
            "leave it away, and shard with `ZeroOptions(tier=ringcomm.Disk(path))`, which keeps a "
            "rank's parameters on a disk at stage 3",
            whole=True,
            switch=switch,
        )
        for name, switch in (("offload_param", "device"), ("cpu_offload_param", ""))
    ),
    *(
        Key(
            _ZERO + name,
            UNSUPPORTED,
            "leave it away, and build the optimizer with `AdamWOptions(tier=ringcomm.Disk(path))`, "
            "which keeps its state on a disk",
            whole=True,
            switch=switch,
        )
        for name, switch in (("offload_optimizer", "device"), ("cpu_offload", ""))
    ),
    Key(_ZERO + "cpu_offload_use_pin_memory", NO_EFFECT, "nothing is kept on the host"),
    Key(
        _ZERO + "zenflow",
        UNSUPPORTED,
        "all parameters step alike; leave the section away",
        whole=True,
    ),
    Key(_ZERO + "sub_group_size", NO_EFFECT, "the step is one pass over buckets"),
    Key(
        _ZERO + "stage3_param_persistence_threshold",
        NO_EFFECT,
        "small parameters are gathered with their unit, and those of the root stay",
    ),
    Key(_ZERO + "stage3_model_persistence_threshold", NO_EFFECT, "as the threshold of a parameter"),
    Key(
        _ZERO + "stage3_max_live_parameters",
        NO_EFFECT,
        "the units that compute and are prefetched are there; `ZeroOptions.units` makes them "
        "smaller",
    ),
    Key(
        _ZERO + "stage3_max_reuse_distance",
        NO_EFFECT,
        "a unit is freed after use; `ZeroOptions(keep_gathered=True)` keeps all until backward",
    ),
    Key(
        _ZERO + "stage3_gather_16bit_weights_on_model_save",
        NO_EFFECT,
        "`zero.export_safetensors` and `zero.full_state_dict` give whole weights",
    ),
    Key(_ZERO + "stage3_module_granularity_threshold", NO_EFFECT, "`ZeroOptions.units` decides"),
    Key(_ZERO + "stage3_use_all_reduce_for_fetch_params", NO_EFFECT, "ranks read shards in place"),
    Key(_ZERO + "stage3_allgather_sequential", NO_EFFECT, "ranks read shards in place"),
    Key(
        _ZERO + "ignore_unused_parameters",
        NO_EFFECT,
        "a parameter without gradient on any rank is left as it is, which raises nothing",
    ),
    Key(_ZERO + "legacy_stage1", NO_EFFECT, "there is one stage 1"),
    Key(_ZERO + "round_robin_gradients", NO_EFFECT, "it speeds up offloading, which there is not"),
    Key(
        _ZERO + "zero_quantized_nontrainable_weights",
        UNSUPPORTED,
        "frozen parameters travel in their own dtype; leave the key away",
    ),
    Key(
        _ZERO + "zero_quantized_gradients",
        UNSUPPORTED,
        "within a node sums stay FP32; between nodes `ZeroOptions(wire=Wire(gradients=))` codes "
        "them: leave the key away",
    ),
    Key(
        _ZERO + "zeropp_loco_param",
        UNSUPPORTED,
        "leave the section away, and choose "
        '`ZeroOptions(wire=zero.Wire("int4", error_feedback=True))`',
        whole=True,
    ),
    Key(
        _ZERO + "mics_shard_size",
        UNSUPPORTED,
        'copies are of nodes: leave the key away, and choose `ZeroOptions(state="node")`',
        off=(*OFF, -1, 0),
    ),
    Key(
        _ZERO + "mics_hierarchical_params_gather",
        UNSUPPORTED,
        "as `mics_shard_size`",
    ),
    Key(_ZERO + "memory_efficient_linear", NO_EFFECT, "linear layers stay torch's"),
    Key(_ZERO + "pipeline_loading_checkpoint", NO_EFFECT, "each rank reads its part"),
    Key(
        _ZERO + "override_module_apply", NO_EFFECT, "`init=` of `zero.shard` fills meta parameters"
    ),
    Key(_ZERO + "log_trace_cache_warnings", NO_EFFECT, "there is no trace of modules"),
    Key(_ZERO + "enable_sanity_checks", NO_EFFECT, "collectives are always checked"),
    Key(_ZERO + "save_muon_momentum_buffer_in_memory", NO_EFFECT, "nothing is swapped to a disk"),
    Key(_ZERO + "leaf_module", NO_EFFECT, "`ZeroOptions.units` decides", whole=True),
    Key("allgather_size", NO_EFFECT, "parameters are gathered in place"),
)

_COMMUNICATION = (
    Key("gradient_allreduce_op", MAPPED, "`ZeroOptions.reduce`"),
    Key(
        "communication_data_type",
        NO_EFFECT,
        "ranks read each other's gradients in the parameters' dtype, and add them in FP32",
    ),
    Key("seq_parallel_communication_data_type", NO_EFFECT, "sequences are the model's own matter"),
    Key("prescale_gradients", NO_EFFECT, "sums are FP32, which nothing need be scaled for"),
    Key("gradient_predivide_factor", NO_EFFECT, "as `prescale_gradients`"),
    Key(
        "sparse_gradients",
        UNSUPPORTED,
        "gradients are dense; build embeddings with `sparse=False`, and leave the key away",
    ),
    Key("disable_allgather", NO_EFFECT, "each rank reads its peers' parameters"),
)

_LOGGING = (
    *(
        Key(name, NO_EFFECT, _TRAINER + "the loop logs what it wants")
        for name in ("steps_per_print", "dump_state", "log_level")
    ),
    *(
        Key(name, NO_EFFECT, _TRAINER + "`zero.profiled` and `ringcomm trace` record a step")
        for name in ("wall_clock_breakdown", "memory_breakdown")
    ),
    *(
        Key(name, NO_EFFECT, _TRAINER + "the loop logs what it wants", whole=True)
        for name in ("tensorboard", "wandb", "csv_monitor", "comet", "timers", "flops_profiler")
    ),
    Key("comms_logger", NO_EFFECT, _TRAINER + "`ringcomm trace` has each call", whole=True),
    Key("vocabulary_size", NO_EFFECT, "DeepSpeed only warns of it"),
    Key(
        "checkpoint",
        NO_EFFECT,
        "`zero.save` writes all or nothing, and `zero.load` reads into any number of ranks",
        whole=True,
    ),
    Key("nebula", NO_EFFECT, "`zero.save` writes checkpoints", whole=True),
    Key("datastates_ckpt", NO_EFFECT, "`zero.save` writes checkpoints", whole=True),
    Key(
        "aio",
        NO_EFFECT,
        "it sets how offloading reads a disk; `ringcomm.Disk` has sizes of its own",
        whole=True,
    ),
)

_ACTIVATIONS = "activation_checkpointing."
_FEATURES = (
    Key(
        _ACTIVATIONS + "partition_activations",
        NO_EFFECT,
        "the model calls `ringcomm.functional.partitioned_checkpoint` for it",
    ),
    Key(
        _ACTIVATIONS + "cpu_checkpointing",
        UNSUPPORTED,
        "activations stay where they are; `torch.autograd.graph.save_on_cpu` moves them",
    ),
    *(
        Key(_ACTIVATIONS + name, NO_EFFECT, "the model calls `torch.utils.checkpoint`")
        for name in (
            "number_checkpoints",
            "contiguous_memory_optimization",
            "synchronize_checkpoint_boundary",
            "profile",
        )
    ),
    Key("graph_harvesting", NO_EFFECT, "`torch.compile` takes the module"),
    Key(
        "compile",
        UNSUPPORTED,
        "DeepCompile rewrites DeepSpeed's graphs; `torch.compile` takes the module",
        whole=True,
        switch="deepcompile",
    ),
    Key(
        "tensor_parallel",
        UNSUPPORTED,
        "`ringcomm.parallel.parallelize`, or torch's `parallelize_module`, divides layers",
        whole=True,
        off=(*OFF, 0, 1),
        switch="autotp_size",
    ),
    Key(
        "expert_parallel",
        UNSUPPORTED,
        "this key divides no experts; `ringcomm.moe.MoE` is a layer whose experts are divided, and "
        "stage 3 shards their parameters",
        whole=True,
        switch="enabled",
    ),
    Key(
        "use_data_before_expert_parallelism",
        UNSUPPORTED,
        "experts are not divided among ranks",
    ),
    Key(
        "pipeline",
        UNSUPPORTED,
        "torch's schedules run a sharded module in a stage (docs/parallelism.md)",
        whole=True,
    ),
    Key(
        "hybrid_engine",
        UNSUPPORTED,
        "there is no engine for inference; evaluate the module",
        whole=True,
        switch="enabled",
    ),
    Key("sparse_attention", UNSUPPORTED, "attention is the model's own", whole=True),
    Key(
        "elasticity",
        UNSUPPORTED,
        "batch sizes are the config's: give them for this number of ranks; a checkpoint loads into "
        "any number",
        whole=True,
        switch="enabled",
    ),
    Key(
        "autotuning",
        UNSUPPORTED,
        "there is no tuner; `ringcomm estimate` computes memory",
        whole=True,
        switch="enabled",
    ),
    *(
        Key(name, UNSUPPORTED, f"{what}; do it in the model or the loop", whole=True, switch=switch)
        for name, what, switch in (
            ("progressive_layer_drop", "layers are not dropped", "enabled"),
            ("curriculum_learning", "data are the loop's own", "enabled"),
            ("data_efficiency", "data and layers are the loop's own", "enabled"),
            ("compression_training", "weights are not compressed", "enabled"),
            ("quantize_training", "weights are not quantized", "enabled"),
            ("eigenvalue", "it serves quantized training, which there is not", "enabled"),
            ("weight_quantization", "weights are not quantized", ""),
        )
    ),
)

#: By name, in the order of the page.
KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        *_BATCHES,
        *_OPTIMIZERS,
        *_PRECISION,
        *_ZERO_KEYS,
        *_COMMUNICATION,
        *_FEATURES,
        *_LOGGING,
    )
}

#: Other names that DeepSpeed takes for keys.
ALIASES = {
    "bfloat16": "bf16",
    _ZERO + "stage3_gather_fp16_weights_on_model_save": (
        _ZERO + "stage3_gather_16bit_weights_on_model_save"
    ),
    **{
        _ZERO + name: _ZERO + "stage3_" + name
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
}

#: Why an optimizer of DeepSpeed's cannot be built.
OTHER_OPTIMIZERS = {
    "lamb": "its trust ratio is of whole layers, of which a rank has a part",
    "muon": "DeepSpeed's marks parameters by `use_muon`; build `Muon` on `muon_groups(model)`",
    "muadam": "build `AdamW` on groups whose rates follow muP",
    "muadamw": "build `AdamW` on groups whose rates follow muP",
    "musgd": "build `SGD` on groups whose rates follow muP",
    **dict.fromkeys(
        ("onebitadam", "zerooneadam", "onebitlamb"), "gradients are not compressed; use AdamW"
    ),
}
