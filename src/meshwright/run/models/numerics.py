"""Facts of a config beside shapes: norms, activation functions, rotary frequencies, routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import InputError
from meshwright.models import Model
from meshwright.models.presets import find_preset

# Families whose layers can be built and trained here; others can only be planned.
TRAINABLE = (
    "gpt2",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
    "kimi_k2",
)
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}


@dataclass(frozen=True)
class Routing:
    """Rules by which a router chooses and weighs experts."""

    sigmoid: bool = False  # of each logit (DeepSeek-V3), else softmax
    normalised: bool = True  # the chosen weights sum to one
    groups: int = 1  # number of groups; experts are chosen from the best `top_groups` of them
    top_groups: int = 1
    scale: float = 1.0
    corrected: bool = False  # a bias that balances load affects the choice, not the weights
    balance: float = 0.0  # weight of the load-balancing loss


@dataclass(frozen=True)
class Numerics:
    """Numerics of one model."""

    vocab: int
    hidden: int
    positions: int = 0  # learned positions; 0: none
    eps: float = 1e-6
    activation: str = "silu"
    theta: float = 10_000.0
    rope: Mapping[str, Any] = field(default_factory=dict)  # scaling of frequencies, in Hugging Face's terms
    interleaved: bool = False  # the values of a rotary pair are adjacent (DeepSeek)
    routing: Routing = Routing()
    initializer: float = 0.02
    embedding_dropout: float = 0.0  # dropout rates of blocks are in the shapes of their layers


def config_of(model: Model) -> Mapping[str, Any]:
    """Return the Hugging Face config that a model was made from."""
    if isinstance(model.reference, str):
        return find_preset(model.reference).config
    if "model_type" not in model.reference:
        raise InputError(f"{model.name} was not made from a config", field="model", valid=", ".join(TRAINABLE))
    return model.reference


def numerics(model: Model) -> Numerics:
    """Read the numerics of a model, with the defaults of transformers' config classes."""
    config = config_of(model)
    family = str(config["model_type"])
    if family not in TRAINABLE:
        raise InputError(f"the family '{family}' cannot be trained", field="model_type", valid=", ".join(TRAINABLE))
    _refuse_noise(config, family)
    if family == "gpt2":
        hidden = int(config["n_embd"])
        return Numerics(
            int(config["vocab_size"]), hidden, int(config.get("n_positions", 1024)),
            float(config.get("layer_norm_epsilon", 1e-5)), _activation(config, "activation_function", "gelu_new"),
            initializer=float(config.get("initializer_range", 0.02)),
            embedding_dropout=_rate(config, "embd_pdrop", 0.1),
        )  # fmt: skip
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", config.get("rope_theta") or _THETA.get(family, 10_000.0)))
    deep = family in {"deepseek_v3", "kimi_k2"}
    return Numerics(
        int(config["vocab_size"]), int(config["hidden_size"]),
        eps=float(config.get("rms_norm_eps", _EPS.get(family, 1e-6))), activation=_activation(config, "hidden_act", "silu"),
        theta=theta, rope=rope, interleaved=deep and bool(config.get("rope_interleave", True)),
        routing=_routing(config, family), initializer=float(config.get("initializer_range", 0.02)),
    )  # fmt: skip


def _rate(config: Mapping[str, Any], name: str, default: float) -> float:
    return default if config.get(name) is None else float(config[name])


# Dropout rates of parts that a language model does not have: GPT-2's summaries, classifiers.
_ELSEWHERE = {"summary_first_dropout", "summary_last_dropout", "classifier_dropout"}


def _refuse_noise(config: Mapping[str, Any], family: str) -> None:
    """Refuse noise on a router's input, and dropout that transformers' class of the family does not have."""
    trained = {"resid_pdrop", "embd_pdrop", "attn_pdrop"} if family == "gpt2" else {"attention_dropout"}
    for name, value in config.items():
        asked = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if asked and name.endswith(("dropout", "pdrop", "dropout_prob")) and name not in trained | _ELSEWHERE:
            raise InputError(f"{family} has no such dropout", field=name, valid=f"0, or {', '.join(sorted(trained))}")
        if asked and name == "router_jitter_noise":
            raise InputError("noise on a router's input cannot be trained yet", field=name, valid="0")


_THETA = {"mixtral": 1e6}
_EPS = {"mixtral": 1e-5}


def _routing(config: Mapping[str, Any], family: str) -> Routing:
    if family in {"deepseek_v3", "kimi_k2"}:
        return Routing(
            sigmoid=True, normalised=bool(config.get("norm_topk_prob", True)), groups=int(config.get("n_group", 8)),
            top_groups=int(config.get("topk_group", 4)), scale=float(config.get("routed_scaling_factor", 2.5)),
            corrected=True,
        )  # fmt: skip
    # transformers adds this loss if the config asks for the router's logits.
    weight = float(config.get("router_aux_loss_coef", 0.001)) if config.get("output_router_logits") else 0.0
    return Routing(normalised=family == "mixtral" or bool(config.get("norm_topk_prob", False)), balance=weight)


def _activation(config: Mapping[str, Any], name: str, default: str) -> str:
    said = str(config.get(name, default))
    if said not in _ACTIVATIONS:
        raise InputError(f"is '{said}'", field=name, valid=", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[said]
