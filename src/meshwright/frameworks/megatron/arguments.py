"""Arguments of a script as data, and the list of those that affect a plan or a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.errors import InputError, shorten

Words = tuple[str, ...]
Arguments = dict[str, Words]  # name without dashes -> the words after it; none: a switch

# Arguments that are read, by their type. Other arguments that a framework lists do not affect a plan.
INTEGERS = frozenset({
    "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels", "num-query-groups",
    "max-position-embeddings", "seq-length", "vocab-size", "padded-vocab-size", "make-vocab-size-divisible-by",
    "num-experts", "moe-router-topk", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size",
    "moe-router-num-groups", "moe-router-group-topk", "mtp-num-layers",
    "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim",
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
    "expert-model-parallel-size", "expert-tensor-parallel-size", "num-distributed-optimizer-instances",
    "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank",
    "microbatch-group-size-per-virtual-pipeline-stage", "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers", "micro-batch-size", "global-batch-size", "recompute-num-layers",
    "cpu-offloading-num-layers",
})  # fmt: skip
NUMBERS = frozenset({
    "attention-dropout", "hidden-dropout", "norm-epsilon", "rotary-base", "rope-scaling-factor",
    "rotary-seq-len-interpolation-factor", "rotary-scaling-factor", "mscale", "mscale-all-dim", "init-method-std",
    "moe-router-topk-scaling-factor", "moe-expert-capacity-factor", "optimizer-offload-fraction", "sgd-momentum",
})  # fmt: skip
WORDS = frozenset({
    "position-embedding-type", "normalization", "tokenizer-type", "tokenizer-model", "moe-layer-freq", "window-size",
    "window-attn-skip-freq", "moe-router-score-function", "pipeline-model-parallel-layout", "recompute-granularity",
    "recompute-method", "fp8-format", "fp8-recipe", "fp4-format", "fp4-recipe", "optimizer", "exp-avg-dtype",
    "exp-avg-sq-dtype", "data-parallel-sharding-strategy", "rope-type", "transformer-impl",
})  # fmt: skip
LISTS = frozenset({"cp-comm-type", "hierarchical-context-parallel-sizes", "recompute-modules"})
SWITCHES = frozenset({
    "group-query-attention", "use-rotary-position-embeddings", "use-rope-scaling", "swiglu", "disable-bias-linear",
    "add-qkv-bias", "qk-layernorm", "untie-embeddings-and-output-weights", "multi-latent-attention",
    "moe-router-pre-softmax", "moe-router-enable-expert-bias", "moe-pad-expert-input-to-capacity",
    "sequence-parallel", "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
    "use-tp-pp-dp-mapping", "use-distributed-optimizer", "use-megatron-fsdp", "use-torch-fsdp2",
    "torch-fsdp2-no-reshard-after-forward", "overlap-grad-reduce", "overlap-param-gather",
    "no-overlap-p2p-communication", "tp-comm-overlap", "recompute-activations", "moe-layer-recompute", "bf16", "fp16",
    "use-precision-aware-optimizer", "optimizer-cpu-offload",
})  # fmt: skip
READ = INTEGERS | NUMBERS | WORDS | LISTS | SWITCHES


@dataclass(frozen=True)
class Given:
    """Arguments of a script with every read checked; a mistake names the argument and the file."""

    file: str
    arguments: Arguments

    def __contains__(self, name: str) -> bool:
        return name in self.arguments

    def text(self, name: str, default: str = "") -> str:
        words = self.arguments.get(name)
        if words is None:
            return default
        if len(words) != 1:
            problem = "needs a value" if not words else f"has {len(words)} values: {shorten(' '.join(words), 40)}"
            raise self.refused(name, problem, "one value")
        if "$" in words[0]:
            raise self.refused(name, f"is {shorten(words[0], 40)}, which the script does not set", "a value")
        return words[0]

    def integer(self, name: str, default: int) -> int:
        """Return a whole number of at least one."""
        text = self.text(name)
        if not text:
            return default
        if not text.isdecimal() or not 1 <= int(text[:12]) <= 10**9:
            raise self.refused(name, f"is {shorten(text, 40)}", "a whole number from 1")
        return int(text)

    def number(self, name: str, default: float) -> float:
        text = self.text(name)
        try:
            return float(text) if text else default
        except ValueError:
            raise self.refused(name, f"is {shorten(text, 40)}", "a number") from None

    def words(self, name: str) -> Words:
        return self.arguments.get(name, ())

    def on(self, name: str) -> bool:
        """Return True if a switch is set; a value after it is a mistake that would shift every later argument."""
        words = self.arguments.get(name)
        if words:
            raise self.refused(name, f"is a switch, but '{shorten(words[0], 40)}' follows it", "nothing")
        return words is not None

    def choice(self, name: str, default: str, valid: Iterable[str]) -> str:
        text = self.text(name, default)
        if text not in (known := list(valid)) and text != default:
            raise self.refused(name, f"is {shorten(text, 40)}", ", ".join(known))
        return text

    def refused(self, name: str, problem: str, valid: str = "") -> InputError:
        return InputError(problem, file=self.file, field=f"--{name}", valid=valid)


def collect(words: Iterable[str], file: str) -> Arguments:
    """Return `--a 1 --b=2 --c` as a table; an argument with two different values is refused with both.

    >>> collect(["--num-layers", "32", "--seq-length=4096", "--bf16"], "")
    {'num-layers': ('32',), 'seq-length': ('4096',), 'bf16': ()}
    """
    found: Arguments = {}
    for name, values in _runs(words):
        if name in found and found[name] != values:
            both = [shorten(" ".join(v), 40) or "no value" for v in (found[name], values)]
            raise InputError(
                f"is given twice: {both[0]} and {both[1]}", file=file, field=f"--{name}", valid="one of them"
            )
        found[name] = values
    return found


def _runs(words: Iterable[str]) -> Iterator[tuple[str, Words]]:
    name, values = "", list[str]()
    for word in words:
        if word.startswith("--") and len(word) > 2:
            if name:
                yield name, tuple(values)
            name, equals, value = word[2:].partition("=")
            name, values = name.replace("_", "-") if "opt_param" not in name else name, [value] if equals else []
        elif name:
            values.append(word)
    if name:
        yield name, tuple(values)
