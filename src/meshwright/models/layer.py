"""Layers of the chain: operators, weights, FLOPs, and the bytes they keep and pass on.

Everything is a sum over operators, so that a plan may recompute any of them alone. Sizes are per token, per query-key
pair or per sample; the degrees of a `Slice` cut them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from meshwright.errors import InputError
from meshwright.models.precision import precision

LayerKind = Literal[
    "embedding", "attention", "cross_attention", "mlp", "moe", "norm", "merge", "pooler", "head", "module"
]
OpKind = Literal[
    "input", "matmul", "attention", "norm", "elementwise", "stream", "lookup", "dispatch", "combine", "loss", "traced"
]
Cut = Literal["none", "column", "row", "expert"]  # how tensor parallelism cuts a matrix product
# How the degrees cut a tensor or the work on it:
#   sequence       each token once per context-parallel rank; over tp too under sequence parallelism
#   tensor         the hidden dimension is cut by tp
#   routed         tokens after dispatch to experts, whole width (etp ranks hold the same tokens)
#   routed_tensor  tokens after dispatch, width cut by etp
#   whole          cut by context parallelism only (layers that tensor parallelism cannot cut)
Scope = Literal["sequence", "tensor", "routed", "routed_tensor", "whole"]
Split = Literal["none", "tensor", "expert"]
Pairs = Literal["none", "full", "causal"]
RecomputeLevel = Literal["none", "selective", "full"]
# An integer, or a numpy array with one value per candidate strategy. Every formula here takes both,
# so that a search prices thousands of candidates in one call. (This room does not import numpy.)
Degrees = Any
Recompute = RecomputeLevel | Collection[str]


@dataclass(frozen=True, slots=True)
class Slice:
    """Work of one device: a micro-batch and the degrees that cut it.

    >>> Slice(micro_batch=1, seq_len=8192, tp=8, sp=True).tokens("sequence", 8192)
    1024.0
    """

    micro_batch: Degrees = 1  # samples per data-parallel replica
    seq_len: int = 2048  # tokens per sample before any cut
    precision: str = "bf16"
    tp: Degrees = 1
    sp: Degrees = False  # Megatron sequence parallelism: norms and residuals cut over tp
    ulysses: Degrees = 1  # sequence cut, heads cut inside attention
    ring: Degrees = 1  # sequence cut, keys and values communicated around the ring
    ep: Degrees = 1
    etp: Degrees = 1
    fused_attention: bool = True  # FlashAttention-like: the score matrix never exists
    whole_logits: bool = True  # the loss keeps every logit; else it processes some tokens at a time

    def tokens(self, scope: Scope, length: int) -> Any:
        """Return the tokens on one device, for a sample of `length` tokens, with the cut of `scope`."""
        tokens = self.micro_batch * length / (self.ulysses * self.ring)
        if scope == "whole":
            return tokens
        if scope == "sequence":
            return tokens / (1 + (self.tp - 1) * self.sp)
        # Experts see each token once over the tp group (tokens are de-duplicated before dispatch).
        return tokens / self.tp * (self.etp if scope == "routed" else 1)


@dataclass(frozen=True, slots=True)
class Weight:
    """Parameters of one operator, and what cuts them."""

    count: int
    split: Split = "none"
    units: int = 1  # indivisible units along the cut dimension: heads, rows of the vocabulary
    experts: int = 0  # experts, each with its own copy, that expert parallelism distributes
    frozen: bool = False  # no gradient and no optimizer state

    def on_device(self, slice_: Slice) -> Any:
        """Return the parameters on one device; a cut that does not divide is padded up."""
        if self.split == "none":
            return self.count
        if self.split == "tensor":
            return -(-self.units // slice_.tp) * (self.count // self.units)
        per_expert = self.count // self.experts
        return -(-self.experts // slice_.ep) * -(-per_expert // slice_.etp)


@dataclass(frozen=True, slots=True)
class Kept:
    """Tensor that the backward pass needs, in elements per token, per query-key pair or per sample."""

    name: str
    per_token: float = 0.0
    per_pair: float = 0.0
    per_sample: float = 0.0
    dtype: Literal["activation", "matmul", "fp32", "byte"] = "activation"
    scope: Scope = "sequence"
    heads: int = 0  # heads stay whole: beyond their number tp x ulysses replicates them
    when: Literal["always", "fused", "unfused", "whole_logits"] = "always"  # which kernels leave it
    needed_next: bool = False  # the next operator's input: stays even if this operator is recomputed

    def bytes(self, slice_: Slice, length: int) -> Any:
        left = {"always": True, "fused": slice_.fused_attention, "unfused": not slice_.fused_attention}
        if not (left | {"whole_logits": slice_.whole_logits})[self.when]:
            return 0.0
        p = precision(slice_.precision)
        size = {"activation": p.activation, "matmul": p.matmul, "fp32": 4.0, "byte": 1.0}[self.dtype]
        per_token = self.per_token + self.per_pair * length + self.per_sample / length
        # A traced polynomial may be negative at lengths that were not measured.
        kept = max(size * per_token, 0.0) * slice_.tokens(self.scope, length)
        if self.heads:
            cut = slice_.tp * slice_.ulysses
            kept = kept * (-(-self.heads // cut) * cut / self.heads)
        return kept


@dataclass(frozen=True, slots=True)
class Op:
    """One operator: its work, its weights, and the outputs that the backward pass needs."""

    name: str
    kind: OpKind
    flops_per_token: float = 0.0
    flops_per_pair: float = 0.0
    flops_per_sample: float = 0.0
    pairs: Pairs = "none"
    window: int = 0  # sliding window in tokens; 0 = none
    k: int = 0  # matrix product: (tokens x rows, k) @ (k, n), before any cut
    n: int = 0
    rows: float = 1.0  # rows per token: a mixture multiplies each token by top-k experts
    cut: Cut = "none"  # column: all-gather of the input; row: all-reduce of the output
    scope: Scope = "tensor"
    moves: float = 0.0  # elements per token read and written in the forward pass, by memory-bound kernels
    shares_input: bool = False  # same input as the product before it: gathered, quantised and kept once
    weights: tuple[Weight, ...] = ()
    keeps: tuple[Kept, ...] = ()
    tied: bool = False  # the weights belong to another layer and are counted there

    @property
    def parameters(self) -> int:
        return 0 if self.tied else sum(w.count for w in self.weights)

    def forward_flops(self, slice_: Slice, length: int) -> Any:
        """Return forward FLOPs on one device; a multiply-add is two. Masked pairs do not count."""
        per_sample = self.flops_per_token * length + self.flops_per_pair * self.pair_count(length)
        per_sample += self.flops_per_sample
        return max(per_sample, 0.0) * self.padding(slice_) * slice_.tokens(self.scope, length) / length

    def padding(self, slice_: Slice) -> Any:
        """Return the factor by which a cut of the weights increases the work, by padding and replicated heads."""
        if self.cut not in {"column", "row"}:
            return 1.0
        cut = [w for w in self.weights if w.split == "tensor"]
        return sum(w.on_device(slice_) for w in cut) * slice_.tp / sum(w.count for w in cut)

    def pair_count(self, length: int) -> float:
        """Return the query-key pairs of one sample that the mask leaves."""
        if self.pairs == "none":
            return 0.0
        window = min(self.window or length, length)
        if self.pairs == "causal":
            return window * length - window * (window - 1) / 2
        return float(length * window)


@dataclass(frozen=True)
class Layer:
    """Layer of the chain, between two places where a pipeline may be cut.

    >>> from meshwright.models import Model
    >>> layer = Model.preset("llama3-70b").layer("block.0.attention")
    >>> layer.kind, layer.parameters, layer.output_bytes(Slice(seq_len=8192))
    ('attention', 151003136, 134217728.0)
    """

    name: str
    kind: LayerKind
    ops: tuple[Op, ...]
    width_out: float  # elements per token passed to the next layer; 0 for the loss
    block: str = ""  # the transformer block it belongs to: the unit of full recompute
    opens_block: bool = True
    width_in: float = 0.0
    tokens: int = 0  # tokens per sample where they do not follow the sequence length (vision)
    carried: float = 0.0  # elements per token passed on unchanged (encoder output in a decoder)
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    top_k: int = 0
    dispatch_width: float = 0.0  # elements per token that each all-to-all of a MoE layer moves
    tied_to: str = ""
    reads: str = ""  # another layer whose output it also reads (cross attention: the end of the encoder)
    shape: object = field(default=None, compare=False, repr=False)  # its source: `Attention`, `Mlp`, `Moe`

    @cached_property
    def parameters(self) -> int:
        """Parameters that belong to this layer (tied weights count where they live)."""
        return sum(op.parameters for op in self.ops)

    @cached_property
    def active_parameters(self) -> float:
        """Parameters that process one token: of the routed experts only the top-k."""
        routed = sum(w.count for op in self.ops for w in op.weights if w.split == "expert")
        return self.parameters - routed * (1 - self.top_k / self.experts if self.experts else 0)

    @cached_property
    def tensor_parallel(self) -> bool:
        """True if tensor parallelism can cut this layer."""
        return all(op.scope != "whole" for op in self.ops)

    @cached_property
    def op_names(self) -> frozenset[str]:
        """Names that a plan may put into a per-operator recompute set."""
        return frozenset(op.name for op in self.ops if op.kind not in {"input", "stream"})

    @property
    def signature(self) -> tuple[object, ...]:
        """Key that is equal for layers of equal cost: the search solves each kind once."""
        return (self.kind, self.ops, self.width_in, self.width_out, self.tokens, self.carried, self.opens_block)

    def length(self, seq_len: int) -> int:
        """Return the tokens of one sample in this layer."""
        return self.tokens or seq_len

    def parameters_on(self, slice_: Slice, *, with_tied: bool = False) -> Any:
        """Return parameters on one device; `with_tied` adds a copy of weights that live in another layer."""
        return sum(w.on_device(slice_) for op in self.ops if with_tied or not op.tied for w in op.weights)

    def expert_parameters_on(self, slice_: Slice) -> Any:
        """Return the parameters of routed experts on one device; they have fewer replicas than the rest."""
        return sum(w.on_device(slice_) for op in self.ops for w in op.weights if w.split == "expert")

    def frozen_parameters_on(self, slice_: Slice, *, with_tied: bool = False) -> Any:
        """Return the frozen parameters on one device."""
        return sum(w.on_device(slice_) for op in self.ops if with_tied or not op.tied for w in op.weights if w.frozen)

    def forward_flops(self, slice_: Slice) -> Any:
        """Return forward FLOPs of one micro-batch on one device."""
        return sum(op.forward_flops(slice_, self.length(slice_.seq_len)) for op in self.ops)

    def recomputed_ops(self, recompute: Recompute, *, fused_attention: bool = True) -> frozenset[str]:
        """Return the names of the operators that the backward pass recomputes, without the input.

        `selective` recomputes cheap work: norms, activation functions, and score matrices of unfused attention
        (Korthikanti et al., 2022). A collection of names recomputes exactly those.
        """
        if recompute == "none":
            return frozenset()
        if recompute == "full":
            return self.op_names
        if recompute == "selective":
            cheap = {"norm", "elementwise"} | (set() if fused_attention else {"attention"})
            return frozenset(op.name for op in self.ops if op.kind in cheap)
        if isinstance(recompute, str):
            raise InputError(f"unknown recompute level '{recompute}'", valid="none, selective, full or operator names")
        return frozenset(recompute) & self.op_names

    def kept_bytes(self, slice_: Slice, recompute: Recompute = "none") -> Any:
        """Return the bytes one micro-batch keeps on a device until its backward pass.

        Full recompute keeps the input of the block, so layers inside a block keep nothing.
        """
        if recompute == "full":
            return self.input_bytes(slice_) if self.opens_block else 0.0
        kept = self.kept_tensors(slice_)
        return sum((kept[i] for i in self.still_kept(recompute, fused_attention=slice_.fused_attention)), 0.0)

    def kept_tensors(self, slice_: Slice) -> list[Any]:
        """Return the bytes of every tensor that the backward pass needs, one by one."""
        length = self.length(slice_.seq_len)
        return [kept.bytes(slice_, length) for op in self.ops for kept in op.keeps]

    def still_kept(self, recompute: Recompute, *, fused_attention: bool = True) -> list[int]:
        """Return the indices of the tensors that stay when some operators are recomputed."""
        again = self.recomputed_ops(recompute, fused_attention=fused_attention)
        tensors = [(op, kept) for op in self.ops for kept in op.keeps]
        return [i for i, (op, kept) in enumerate(tensors) if op.name not in again or kept.needed_next]

    def input_bytes(self, slice_: Slice) -> Any:
        """Return the bytes of the layer's own input on one device."""
        return self._passed(self.width_in, slice_)

    def output_bytes(self, slice_: Slice) -> Any:
        """Return the bytes passed to the next layer, on one device."""
        return self._passed(self.width_out, slice_) + self._passed(self.carried, slice_)

    def dispatch_bytes(self, slice_: Slice) -> Any:
        """Return the bytes that one device contributes to each all-to-all of a MoE layer (0 elsewhere)."""
        size = precision(slice_.precision).activation
        return size * self.dispatch_width * slice_.tokens("routed_tensor", self.length(slice_.seq_len))

    def _passed(self, width: float, slice_: Slice) -> Any:
        scope: Scope = "sequence" if self.tensor_parallel else "whole"
        return precision(slice_.precision).activation * width * slice_.tokens(scope, self.length(slice_.seq_len))
