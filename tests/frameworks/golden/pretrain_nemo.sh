#!/usr/bin/env bash
# llama3-70b on 8x8xh100: 512 samples of 8,192 tokens, bf16, adamw
# A recipe of Megatron-Bridge, written by meshwright.
# Start it on every node, with its own NODE_RANK:
#   BRIDGE=~/Megatron-Bridge NODE_RANK=0 MASTER_ADDR=node0 bash pretrain_nemo.sh
set -euo pipefail

BRIDGE=${BRIDGE:-Megatron-Bridge}  # a checkout of NVIDIA-NeMo/Megatron-Bridge
NNODES=${NNODES:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}
RECIPE=${RECIPE:-llama3_70b_pretrain_config}
DATASET=${DATASET:-llm-pretrain-mock}

OVERRIDES=(
    model.tensor_model_parallel_size=4
    model.pipeline_model_parallel_size=4
    model.virtual_pipeline_model_parallel_size=null
    'model.pipeline_model_parallel_layout="Et*19|(t*20|)*2t*21L"'
    model.microbatch_group_size_per_vp_stage=null
    model.context_parallel_size=2
    model.cp_comm_type=p2p
    model.hierarchical_context_parallel_sizes=null
    model.sequence_parallel=true
    model.expert_model_parallel_size=1
    model.expert_tensor_parallel_size=null
    model.tp_comm_overlap=false
    model.recompute_granularity=full
    model.recompute_method=uniform
    model.recompute_num_layers=1
    model.recompute_modules=null
    model.cpu_offloading_num_layers=0
    ddp.use_distributed_optimizer=true
    ddp.overlap_grad_reduce=true
    ddp.overlap_param_gather=true
    ddp.num_distributed_optimizer_instances=1
    ddp.use_megatron_fsdp=false
    ddp.data_parallel_sharding_strategy=no_shard
    dist.use_tp_pp_dp_mapping=false
    train.micro_batch_size=1
    train.global_batch_size=512
    dataset.seq_length=8192
    optimizer.optimizer=adam
    optimizer.use_precision_aware_optimizer=false
    optimizer.exp_avg_dtype=torch.float32
    optimizer.exp_avg_sq_dtype=torch.float32
    optimizer.optimizer_cpu_offload=false
    optimizer.optimizer_offload_fraction=0.0
    optimizer.overlap_cpu_optimizer_d2h_h2d=false
    model.seq_length=8192
    model.cpu_offloading=false
    model.overlap_p2p_comm=false
    model.batch_p2p_comm=true
    optimizer.use_distributed_optimizer=true
    dist.use_megatron_fsdp=false
    mixed_precision=bf16_mixed
    comm_overlap=null
)

torchrun --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    "$BRIDGE/scripts/training/run_recipe.py" --recipe "$RECIPE" --dataset "$DATASET" "${OVERRIDES[@]}" "$@"
