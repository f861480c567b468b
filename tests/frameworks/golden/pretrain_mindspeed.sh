#!/usr/bin/env bash
# llama3-70b on 8x8xh100: 512 samples of 8,192 tokens, bf16, adamw
# Arguments of MindSpeed-LLM, written by meshwright.
# Start it on every node, with its own NODE_RANK:
#   MINDSPEED=~/MindSpeed-LLM DATA_PATH=... TOKENIZER=... NODE_RANK=0 MASTER_ADDR=node0 bash pretrain_mindspeed.sh
set -euo pipefail

MINDSPEED=${MINDSPEED:-MindSpeed-LLM}  # a checkout of Ascend/MindSpeed-LLM
NNODES=${NNODES:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}
export CUDA_DEVICE_MAX_CONNECTIONS=1

MODEL_ARGS=(
    --use-mcore-models
    --num-layers 80
    --hidden-size 8192
    --num-attention-heads 64
    --max-position-embeddings 8192
    --ffn-hidden-size 28672
    --swiglu
    --group-query-attention
    --num-query-groups 8
    --position-embedding-type rope
    --normalization RMSNorm
    --norm-epsilon 1e-06
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --use-flash-attn
    --use-fused-rmsnorm
    --use-fused-swiglu
    --use-fused-rotary-pos-emb
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 4
    --context-parallel-size 2
    --sequence-parallel
    --num-layer-list 19,20,20,21
    --context-parallel-algo megatron_cp_algo
    --use-cp-send-recv-overlap
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
MEMORY_ARGS=(
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
BATCH_ARGS=(
    --micro-batch-size 1
    --global-batch-size 512
    --seq-length 8192
)
PRECISION_ARGS=(
    --bf16
)
OPTIMIZER_ARGS=(
    --optimizer adam
)
DATA_ARGS=(
    --data-path ${DATA_PATH:?}
    --split 100,0,0
    --tokenizer-type PretrainedFromHF
    --tokenizer-name-or-path ${TOKENIZER:?}
    --vocab-size 128256
    --make-vocab-size-divisible-by 1
)
LOG_ARGS=(
    --train-iters ${TRAIN_ITERS:-50}
    --lr ${LR:-3e-4}
    --log-interval 1
)

torchrun --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    "$MINDSPEED/pretrain_gpt.py" "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${MEMORY_ARGS[@]}" "${BATCH_ARGS[@]}" "${PRECISION_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${DATA_ARGS[@]}" "${LOG_ARGS[@]}" "$@"
