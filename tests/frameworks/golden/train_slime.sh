#!/usr/bin/env bash
# llama3-70b on 8x8xh100: 512 samples of 8,192 tokens, bf16, adamw
# Arguments of slime, written by meshwright.
# Start it where a Ray cluster of all nodes listens:
#   HF_CHECKPOINT=... REF_LOAD=... PROMPT_DATA=... ROLLOUT_BATCH_SIZE=... bash train_slime.sh
set -euo pipefail

RAY_ADDRESS=${RAY_ADDRESS:-http://127.0.0.1:8265}
MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --num-attention-heads 64
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
    --vocab-size 128256
    --make-vocab-size-divisible-by 64
)
CKPT_ARGS=(
    --hf-checkpoint ${HF_CHECKPOINT:?}
    --ref-load ${REF_LOAD:?}
)
ROLLOUT_ARGS=(
    --prompt-data ${PROMPT_DATA:?}
    --num-rollout ${NUM_ROLLOUT:-100}
    --rollout-batch-size ${ROLLOUT_BATCH_SIZE:?}
    --n-samples-per-prompt ${SAMPLES_PER_PROMPT:-8}
)
PERF_ARGS=(
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 4
    --context-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-layout 'Et*19|(t*20|)*2t*21L'
    --cp-comm-type p2p
    --overlap-grad-reduce
    --overlap-param-gather
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --micro-batch-size 1
    --global-batch-size 512
    --seq-length 8192
)
OPTIMIZER_ARGS=(
    --optimizer adam
)
ACTOR_ARGS=(
    --actor-num-nodes 8
    --actor-num-gpus-per-node 8
)

ray job submit --address="$RAY_ADDRESS" \
    --runtime-env-json='{"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}' \
    -- python3 train.py "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${PERF_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${ACTOR_ARGS[@]}" "$@"
