"""Contents of torchtitan 0.3.0: models by flavour, and training configurations by function."""

from __future__ import annotations

from typing import Any, Final

# Preset -> (module, flavour): torchtitan/models/*/__init__.py. Parameters are tested to be equal.
FLAVORS: Final = {
    "llama3.2-1b": ("llama3", "1B"),
    "llama3.2-3b": ("llama3", "3B"),
    "llama3-8b": ("llama3", "8B"),
    "llama3.1-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3.1-70b": ("llama3", "70B"),
    "llama3.3-70b": ("llama3", "70B"),
    "llama3.1-405b": ("llama3", "405B"),
    "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B"),
    "qwen3-4b": ("qwen3", "4B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"),
    "qwen3-32b": ("qwen3", "32B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
    "deepseek-v2-lite": ("deepseek_v3", "16B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
}
# Longest sequence of the rotary embedding in a module's flavours; a longer one is refused (models/common/decoder.py).
LONGEST: Final = {"llama3": 131072, "qwen3": 40960, "deepseek_v3": 16384}
# Flavour -> preset; if several presets share one, the first listed.
PRESETS: Final = {flavor: name for name, flavor in reversed(FLAVORS.items())}

# Function of a config_registry -> its values for a plan or a job: torchtitan/models/*/config_registry.py.
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    name: {
        "model_spec": flavor,
        "training.local_batch_size": samples,
        "training.seq_len": seq,
        "activation_checkpoint": recompute,
        **more,
    }
    for name, flavor, samples, seq, recompute, more in (
        ("llama3_8b", ("llama3", "8B"), 1, 8192, "selective", {}),
        ("llama3_70b", ("llama3", "70B"), 8, 8192, "full", {"parallelism.tensor_parallel_degree": 8}),
        ("llama3_405b", ("llama3", "405B"), 2, 8192, "full",
         {"parallelism.tensor_parallel_degree": 8, "converters": "Float8LinearConverter",
          "compile.enable": True, "compile.enable_async_tensor_parallel": True}),
        ("qwen3_0_6b", ("qwen3", "0.6B"), 4, 4096, "selective", {}),
        ("qwen3_1_7b", ("qwen3", "1.7B"), 4, 4096, "selective", {}),
        ("qwen3_14b", ("qwen3", "14B"), 4, 4096, "full", {}),
        ("qwen3_32b", ("qwen3", "32B"), 2, 4096, "full", {}),
        ("qwen3_30b_a3b", ("qwen3", "30B-A3B"), 2, 4096, "full", {}),
        ("deepseek_v3_16b", ("deepseek_v3", "16B"), 4, 4096, "selective",
         {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B", "parallelism.expert_parallel_degree": 8,
          "compile.enable": True, "training.disable_cuda_graphs": True}),
        ("deepseek_v3_671b", ("deepseek_v3", "671B"), 4, 4096, "selective",
         {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B", "parallelism.expert_parallel_degree": 2,
          "compile.enable": True, "training.disable_cuda_graphs": True}),
    )
}  # fmt: skip

SCHEDULES: Final = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",  # of several stages per group; of one, as a table
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
CONVERTERS: Final = {
    "fp8": "Float8LinearConverter",
    "mxfp8": "MXFP8LinearConverter",
    "nvfp4": "NVFP4LinearConverter",
}
