#!/bin/bash
# Llama 3 70B as Megatron-Bridge's recipe llama3_70b_pretrain_config trains it (NVIDIA-NeMo/Megatron-Bridge 0.3.1,
# src/megatron/bridge/recipes/llama/llama3.py), in the arguments of Megatron-LM.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-8}
TP=${TP:-4}
PP=4
CP=2

MODEL_ARGS=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size $PP
    --num-virtual-stages-per-pipeline-rank 5  # 4 blocks each
    --context-parallel-size $CP
    --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 512 --train-iters 1168251
    --bf16 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 2000 --lr-decay-style cosine
    --cross-entropy-loss-fusion --cross-entropy-fusion-impl te
    --manual-gc --manual-gc-interval 100
)
DATA_ARGS="--mock-data --tokenizer-type NullTokenizer --vocab-size 128255"

torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank ${SLURM_NODEID:-0} \
    --master_addr ${MASTER_ADDR:-localhost} --master_port 6000 \
    pretrain_gpt.py ${MODEL_ARGS[@]} ${PARALLEL_ARGS[@]} ${TRAINING_ARGS[@]} $DATA_ARGS 2>&1 | tee train.log
