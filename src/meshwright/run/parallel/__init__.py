"""A plan applied to a model: tensor and data parallelism, ZeRO, pipelines. Start with `apply`.

- `apply`: (model, plan, process) -> what this process trains, in one readable order
- `compression`: which gradients travel compressed, as a plan says
- `compression_rules`: what a plan's rule of compression asks for
- `ddp`: sums of gradients over replicas that hold everything alike (ZeRO 0), hidden under the backward pass
- `executor`: runs the action table of a plan: forwards, backwards and transfers
- `fsdp`: ZeRO by PyTorch's `fully_shard`
- `parallel_model`: the part of a model that one process trains
- `redistribute`: activations between layers that are cut differently
- `refusals`: what a plan may ask for and cannot be run yet
- `replica_sync`: parameters that several spans hold
- `stage`: what one process trains of one stage
- `tensor_parallel`: tensor and expert parallelism
"""
