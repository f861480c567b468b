"""Plans trained on PyTorch: modules, meshes, pipelines, optimizers, data, checkpoints."""
