"""The logits of every shipped model, computed once more: numpy, float64, one formula after another.

Nothing here is taken from `spmdtrain`: it reads the settings of [model] and the parameters by their
dotted paths, layers in front. Letters: b batch, t query, s key, e embed, k key-value heads, g query
heads of each, d head_dim, f ffn, v vocab.
"""

import math
from typing import Any

import numpy as np
from mixer_oracle import conv_layer, delta_layer, ssd_layer

Params = dict[str, np.ndarray]
CLAMP = 7  # of gpt-oss: its gates and values


def logits(
    model: Any, params: Params, tokens_bt: np.ndarray, routed: list | None = None
) -> np.ndarray:
    """[b, t, v] of whole sequences that begin at position 0.

    `routed` gets what `gates` returns, of each layer with experts.
    """
    p = {path: np.asarray(x, np.float64) for path, x in params.items()}
    return head(model, p, "norm", stream(model, p, tokens_bt, routed))


def further_logits(model: Any, params: Params, tokens_bt: np.ndarray) -> list[np.ndarray]:
    """[b, t - depth, v] of each depth of `model.multi_token`, from 1: of the token after those."""
    p = {path: np.asarray(x, np.float64) for path, x in params.items()}
    x = stream(model, p, tokens_bt)
    if model.multi_token.after_norm:
        x = normed(model, p, "norm", x)
    found = []
    for depth in range(1, model.multi_token.depth + 1):
        prefix = f"further.{depth - 1}."
        own = {path.removeprefix(prefix): w for path, w in p.items() if path.startswith(prefix)}
        of_block = {
            name.removeprefix("block.layer."): w[0] for name, w in own.items() if w.ndim > 1
        }
        token = normed(model, own, "token_norm", embedded(model, p, tokens_bt[:, depth:]))
        before = normed(model, own, "stream_norm", x[:, : token.shape[1]])
        x = token @ own["join_2ee"][0] + before @ own["join_2ee"][1]
        x = block(model, of_block, x, model.layers - 1)
        found.append(head(model, p | own, "norm", x))
        if model.multi_token.after_norm:
            x = normed(model, own, "norm", x)
    return found


def embedded(model: Any, p: Params, tokens_bt: np.ndarray) -> np.ndarray:
    x = p["tokens.table_ve"][tokens_bt]
    return x * (math.sqrt(model.embed) if model.embed_scale == "sqrt" else model.embed_scale)


def stream(model: Any, p: Params, tokens_bt: np.ndarray, routed: list | None = None) -> np.ndarray:
    """What comes out of the last layer."""
    x = embedded(model, p, tokens_bt)
    if model.positions == "learned":
        x = x + p["positions_te"][: tokens_bt.shape[1]]
    parts = token_layers(model, p, x, tokens_bt)
    kept = {}  # by the window of a layer: its keys and values
    for number in range(model.layers):
        layer = layer_params(model, p, number) | {"kept": kept}
        if parts is not None:
            layer = layer | {"own": parts[:, :, number]}
        x = block(model, layer, x, number, routed)
    return x


def head(model: Any, p: Params, norm: str, x: np.ndarray) -> np.ndarray:
    table = p["tokens.table_ve" if model.tied else "unembed_ve"]
    x = normed(model, p, norm, x)
    return capped(x @ table.T * model.logit_scale, model.logit_cap)


def block(
    model: Any, layer: Params, x: np.ndarray, number: int, routed: list | None = None
) -> np.ndarray:
    before = x
    if any(path.startswith("attention.") for path in layer):
        y = mixed(model, layer, normed(model, layer, "attention_norm", x), number)
        x = x + model.residual_scale * normed(model, layer, "attention_out_norm", y)
    if not any(path.startswith("mlp.") for path in layer):
        return x
    name, x_of_mlp = ("mlp_norm", x)
    if model.norm_places == "parallel":
        name, x_of_mlp = ("attention_norm", before)
    y = normed(model, layer, name, x_of_mlp)
    if "mlp.router.weight_ex" in layer:
        found = gates(model, layer, routers_input(model, layer, x, y))
        y = beside(model, layer, x, y, found[2])
        if routed is not None:
            routed.append(found)
    else:
        y = mlp(model, layer, y)
    x = x + model.residual_scale * normed(model, layer, "mlp_out_norm", y)
    if "own" in layer:
        x = x + normed(model, layer, "token_part.norm", gated_own(model, layer, x))
    return scaled_layer(x, layer)


def beside(model: Any, layer: Params, x: np.ndarray, y: np.ndarray, found: np.ndarray) -> Any:
    """The experts of y, the normed stream; with norms of their own, of x, the stream itself."""
    if not model.experts.own_norms:
        return experts(model, layer, y, found)
    chosen = routed_experts(model, layer, normed(model, layer, "mlp.norm", x), found)
    shared = shared_experts(model, layer, normed(model, layer, "mlp.shared_norm", x))
    shared = normed(model, layer, "mlp.shared_out_norm", shared)
    return shared + normed(model, layer, "mlp.out_norm", chosen)


def routers_input(model: Any, layer: Params, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The input of a router: y, the normed stream, or x, the stream, under a norm of its own."""
    if not model.experts.own_norms:
        return y
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm_epsilon)
    return x * layer["mlp.router.scale_e"] / np.sqrt(model.embed)


def token_layers(model: Any, p: Params, x: np.ndarray, tokens_bt: np.ndarray) -> Any:
    """What all layers read of each token beside the stream: [b, t, l, p]."""
    if model.token_layers is None:
        return None
    shape = (*tokens_bt.shape, model.layers, model.token_layers.dim)
    projected = (x @ p["blocks.beside.project_ef"]).reshape(shape) / np.sqrt(model.embed)
    projected = projected / np.sqrt((projected**2).mean(-1, keepdims=True) + model.norm_epsilon)
    projected = projected * (model.norm_offset + p["blocks.beside.scale_p"])
    rows = p["blocks.beside.table_vf"][tokens_bt].reshape(shape) * np.sqrt(shape[-1])
    return (projected + rows) / np.sqrt(2)


def gated_own(model: Any, p: Params, x: np.ndarray) -> np.ndarray:
    """The projection of what a layer reads of each token, times its gate."""
    gate = x @ p["token_part.gate_ep"]
    gate = gelu_tanh(gate) if model.mlp == "geglu" else gate / (1 + np.exp(-gate))
    return (gate * p["own"]) @ p["token_part.out_pe"]


def scaled_layer(x: np.ndarray, layer: Params) -> np.ndarray:
    """The stream times the number of the layer, if it has one."""
    return x * layer.get("layer_scale.scale", 1)


def layer_params(model: Any, p: Params, number: int) -> Params:
    """The parameters of one layer: of the first dense ones, or of its place in a round."""
    stack = next(s for s in reversed(model.stacks) if s.first <= number)
    place, at = divmod(number - stack.first, len(stack.pattern))
    prefix = f"{stack.path}.layer."
    if len(stack.pattern) > 1:
        prefix += f"block.{at}."
    return {path.removeprefix(prefix): w[place] for path, w in p.items() if path.startswith(prefix)}


def capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def normed(model: Any, p: Params, name: str, x: np.ndarray) -> np.ndarray:
    """LayerNorm or RMSNorm over e; x itself where the layer has no norm of this name."""
    if f"{name}.scale_e" not in p:
        return x
    if model.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm_epsilon)
    x = x * (model.norm_offset + p[f"{name}.scale_e"])
    return x + p.get(f"{name}.bias_e", 0)


def mixed(model: Any, p: Params, x: np.ndarray, number: int) -> np.ndarray:
    """What a layer's attention, or what it has in its place, adds to the stream."""
    if "attention.ssd.zxt_ehrn" in p:
        return both_mixed(model, p, x, number)
    # Their own weights.
    own = {"attention.qkvz_ehn": delta_layer, "attention.in_e3c": conv_layer}
    own["attention.zxt_ehrn"] = ssd_layer
    for path, layer in own.items():
        if path in p:
            starts = np.zeros(x.shape[:2], bool)
            return layer(model, lambda name: p[f"attention.{name}"], x, starts)
    return attention(model, p, x, number)


def both_mixed(model: Any, p: Params, x: np.ndarray, number: int) -> np.ndarray:
    """The sum of attention and of a state space, which read the same."""
    own = {path.replace("attention.attention.", "attention."): w for path, w in p.items()}
    y = model.both.out_factor * attention(model, own, x * model.both.in_factor, number)
    starts = np.zeros(x.shape[:2], bool)
    return y + ssd_layer(model, lambda name: p[f"attention.ssd.{name}"], x, starts)


def attention(model: Any, p: Params, x: np.ndarray, number: int) -> np.ndarray:
    window = model.windows[number % len(model.windows)] if model.windows else 0
    if model.latent is None:
        q, k, v = grouped(model, p, x, number, window)
    else:
        q, k, v = latent(model, p, x, number, window)
    q = q * query_factors(model, x.shape[1], number)[:, None, None]
    dim = q.shape[-1]
    scale = dim**-0.5 if model.score_scale is None else model.score_scale
    scores = capped(scale * np.einsum("bthd,bshd->bhts", q, k), model.score_cap)
    place = np.arange(x.shape[1])
    distance = place[:, None] - place[None]
    seen = (distance >= 0) & (distance < (window or x.shape[1]))
    if chunk := model.chunks[number % len(model.chunks)] if model.chunks else 0:
        seen &= place[:, None] // chunk == place[None] // chunk
    scores = np.where(seen, scores, -np.inf)
    sinks = np.full(model.heads, -np.inf)
    if model.sinks:
        sinks = p["attention.sinks"]
    column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
    scores = np.concatenate((scores, column), -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., :-1]
    out = p["attention.out_kgde"].reshape(model.heads, -1, model.embed)
    attended = np.einsum("bhts,bshd->bthd", weights, v)
    y = np.tensordot(attended * output_gate(model, p, x), out, 2)
    return y + p.get("attention.out_bias", 0)


def has_rope(model: Any, number: int) -> bool:
    ropes = model.rope_layers
    return model.positions == "rope" and (not ropes or ropes[number % len(ropes)])


def query_factors(model: Any, length: int, number: int) -> np.ndarray:
    """What the query of each position is multiplied by."""
    of = model.temperature
    ropes = model.rope_layers
    turns = model.positions == "rope" and (not ropes or ropes[number % len(ropes)])
    if of is None or (of.layers == "no_rope" and turns):
        return np.ones(length)
    return 1 + of.weight * np.log(1 + np.floor((np.arange(length) + of.offset) / of.length))


def output_gate(model: Any, p: Params, x: np.ndarray) -> np.ndarray | float:
    """What the output of each query head is multiplied by, [b, t, h, d or 1]."""
    if model.output_gate == "none":
        return 1.0
    if model.output_gate == "head":
        gate = np.tensordot(x, p["attention.gate_ekg"].reshape(len(x[0, 0]), -1, 1), 1)
    else:  # the odd slots of each key-value head, before its keys and values
        of_gates = p["attention.qkv_eknd"][:, :, 1:-2:2]
        gate = np.tensordot(x, of_gates, 1)
        if "attention.qkv_bias" in p:
            bias = p["attention.qkv_bias"].reshape(of_gates.shape[1], -1, model.head_dim)
            gate = gate + bias[:, 1:-2:2]
        gate = gate.reshape(*x.shape[:2], model.heads, model.head_dim)
    return 1 / (1 + np.exp(-gate))


def grouped(model: Any, p: Params, x: np.ndarray, number: int, window: int) -> tuple:
    """(queries, keys, values) of each query head, [b, t, h, d]."""
    heads, kv_heads, dim, are_keys = sizes(model, window)
    group = heads // kv_heads
    if "attention.q_eknd" in p:
        q = np.einsum("bte,eknd->btknd", x, p["attention.q_eknd"])
        if "attention.q_bias" in p:
            q = q + p["attention.q_bias"].reshape(q.shape[2:])
        q = q.reshape(*q.shape[:2], heads, dim)
        q = query_normed(model, q, p["attention.query_key_norm.query_scale"])
        return turned(model, q, window), *p["kept"][bool(window)]
    name = "qk_eknd" if are_keys else "qkv_eknd"
    qkv = np.einsum("bte,eknd->btknd", x, p[f"attention.{name}"])
    bias = name.replace("_eknd", "_bias")
    if f"attention.{bias}" in p:
        qkv = qkv + p[f"attention.{bias}"].reshape(qkv.shape[2:])
    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    if are_keys:
        q, k = qkv[..., :-1, :], v
    if model.output_gate == "channel":
        q = q[..., ::2, :]
    q = q.reshape(*q.shape[:2], heads, dim)
    if model.query_norm in ("head", "all"):
        q = query_normed(model, q, p["attention.query_key_norm.query_scale"])
        k = query_normed(model, k, p["attention.query_key_norm.key_scale"])
    if model.positions == "rope" and (
        not model.rope_layers or model.rope_layers[number % len(model.rope_layers)]
    ):
        q, k = (turned(model, each, window) for each in (q, k))
        if model.query_norm == "after":
            q, k = (
                each / np.sqrt((each * each).mean(-1, keepdims=True) + model.norm_epsilon)
                for each in (q, k)
            )
    if model.value_norm:
        v = v / np.sqrt((v * v).mean(-1, keepdims=True) + model.norm_epsilon)
    k, v = (np.repeat(each, group, axis=2) for each in (k, v))
    keep(p.get("kept", {}), bool(window), (k, v))
    return q, k, v


def keep(kept: dict, has_window: bool, keys: tuple) -> None:
    """Later layers that share keys read those of the last layer before them of their kind."""
    kept[has_window] = keys


def sizes(model: Any, window: int) -> tuple[int, int, int, bool]:
    """(query heads, key-value heads, channels of a head, are values the projected keys)."""
    full = None if window else model.full
    if full is None:
        return model.heads, model.kv_heads, model.head_dim, False
    kv_heads, dim = full.kv_heads or model.kv_heads, full.head_dim or model.head_dim
    return model.heads, kv_heads, dim, full.keys_are_values


def latent(model: Any, p: Params, x: np.ndarray, number: int, window: int) -> tuple:
    """The same of latent attention, where the last channels of queries and keys may turn."""
    of, epsilon = model.latent, model.latent.epsilon or model.norm_epsilon

    def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * scale

    rank, plain = of.query_rank or 0, of.plain_dim
    down = x @ p["attention.down_eu"]
    queries = normed(down[..., :rank], p["attention.query_scale"]) if rank else x
    q = np.einsum("btr,rhd->bthd", queries, p["attention.query_rkd"])
    c = normed(down[..., rank : rank + of.rank], p["attention.latent_scale"])
    kv = np.einsum("btr,rhd->bthd", c, p["attention.key_value_ckd"])
    shared, queries = down[..., None, rank + of.rank :], q[..., plain:]
    if has_rope(model, number):
        shared, queries = turned(model, shared, window), turned(model, queries, window)
    shared = np.broadcast_to(shared, (*q.shape[:3], of.rope_dim))
    q = np.concatenate((q[..., :plain], queries), -1)
    return q, np.concatenate((kv[..., :plain], shared), -1), kv[..., plain:]


def query_normed(model: Any, x_bthd: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """RMSNorm of queries or keys: of each head, or of all heads as one vector."""
    x = x_bthd
    if model.query_norm == "all":
        x = x.reshape(*x.shape[:2], -1)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm_epsilon)
    return (x * (model.norm_offset + scale)).reshape(x_bthd.shape)


def turned(model: Any, x_bthd: np.ndarray, window: int) -> np.ndarray:
    """The first channels of each head turned: pair i is the channels i and i + half."""
    channels = int(x_bthd.shape[-1] * model.rope_share)
    theta = model.rope_theta
    scaling = model.rope_scaling
    if window and model.rope_theta_window is not None:
        theta, scaling = model.rope_theta_window, None
    frequency = theta ** (-2 * np.arange(channels // 2) / channels)
    size = 1.0
    if scaling is not None:
        frequency, size = scaled(scaling, frequency, theta)
    angle = np.arange(x_bthd.shape[1])[:, None, None] * frequency
    turning = size * np.exp(1j * angle)
    pairs = x_bthd[..., : channels // 2] + 1j * x_bthd[..., channels // 2 : channels]
    pairs = pairs * turning
    return np.concatenate((pairs.real, pairs.imag, x_bthd[..., channels:]), -1)


def scaled(scaling: Any, frequency: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
    """(slower frequencies, what cosines and sines are multiplied by)."""
    length, factor = scaling.original_length, scaling.factor
    size = 1.0
    if scaling.kind == "linear":
        frequency = frequency / factor
    elif scaling.kind == "proportional":
        turning = int(scaling.share * 2 * len(frequency) // 2)
        frequency = np.where(np.arange(len(frequency)) < turning, frequency / factor, 0)
    elif scaling.kind == "llama3":
        wave = 2 * np.pi / frequency
        turns, low, high = length / wave, scaling.low_factor, scaling.high_factor
        share = turns >= low if high == low else ((turns - low) / (high - low)).clip(0, 1)
        frequency = (1 - share) * frequency / factor + share * frequency
    elif scaling.kind == "yarn":
        channels = 2 * len(frequency)

        def pair(turns: float) -> float:
            return channels * np.log(length / (2 * np.pi * turns)) / (2 * np.log(theta))

        low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
        if scaling.truncate:
            low, high = np.floor(low), np.ceil(high)
        low, high = max(low, 0), min(high, channels - 1)
        high += 0.001 * (low == high)
        ramp = ((np.arange(len(frequency)) - low) / (high - low)).clip(0, 1)
        frequency = ramp * frequency / factor + (1 - ramp) * frequency
        size = 0.1 * np.log(factor) + 1
    else:
        frequency = frequency / np.array(scaling.long if scaling.use == "long" else scaling.short)
        size = np.sqrt(1 + np.log(factor) / np.log(length))
    return frequency, size if scaling.scale is None else scaling.scale


def gates(model: Any, p: Params, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(logits, scores, gates), [b, t, x]: a gate is 0 where the expert is not chosen."""
    of = model.experts
    logits = x @ p["mlp.router.weight_ex"] + p.get("mlp.router.logit_bias_x", 0)
    scores = 1 / (1 + np.exp(-logits))
    if of.score == "softmax":
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores = scores / scores.sum(-1, keepdims=True)
    ranks = scores if of.bias_rate is None else scores + p["mlp.router.load_bias_x"]
    found = np.zeros_like(scores)
    size = of.count // of.groups
    for place in np.ndindex(scores.shape[:2]):
        groups = ranks[place].reshape(of.groups, size)
        best = np.argsort(-np.sort(groups, -1)[:, -2:].sum(-1), kind="stable")
        allowed = [size * g + n for g in best[: of.groups_kept or of.groups] for n in range(size)]
        chosen = sorted(allowed, key=lambda one, place=place: -ranks[place][one])[: of.chosen]
        gate = scores[place][chosen]
        total = max(gate.sum(), of.smallest_sum) + of.sum_epsilon
        found[place][chosen] = of.scale * (gate / total if of.normalise else gate)
    found = found * expert_scale(p)
    return logits, scores, found


def expert_scale(p: Params) -> np.ndarray | float:
    """The factor of the gates of each expert, [x]."""
    return p.get("mlp.router.scale_x", 1.0)


def shared_gate(p: Params, x: np.ndarray) -> np.ndarray | float:
    """What the output of the shared experts is multiplied by."""
    if "mlp.shared_gate_e1" not in p:
        return 1.0
    return 1 / (1 + np.exp(-x @ p["mlp.shared_gate_e1"]))


def experts(model: Any, p: Params, x: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Every expert of every token, times its gate, and the shared ones."""
    return shared_experts(model, p, x) + routed_experts(model, p, x, found)


def shared_experts(model: Any, p: Params, x: np.ndarray) -> np.ndarray:
    """The mlp of all tokens, times its gate if it has one."""
    if not model.experts.shared:
        return np.zeros(())
    shared = {name: w for name, w in p.items() if name.startswith("mlp.shared.")}
    y = mlp(model, {name.replace("shared.", ""): w for name, w in shared.items()}, x)
    return y * shared_gate(p, x)


def routed_experts(model: Any, p: Params, x: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Every expert of every token, times its gate."""
    routed = np.zeros(())
    read = x @ p["mlp.narrow_in_el"] if model.experts.width else x
    for number in range(model.experts.count):
        names = {"up_xeu": "up_ef", "down_xfe": "down_fe", "up_bias": "up_bias"}
        names["down_bias"] = "down_bias"
        own = {
            f"mlp.{ours}": p[f"mlp.{name}"][number]
            for name, ours in names.items()
            if f"mlp.{name}" in p
        }
        gate = found[..., number, None]
        if model.experts.gate_input:
            routed = routed + mlp(model, own, gate * read)
        else:
            routed = routed + gate * mlp(model, own, read)
    return routed @ p["mlp.narrow_out_le"] if model.experts.width else routed


def mlp(model: Any, p: Params, x: np.ndarray) -> np.ndarray:
    up = np.tensordot(x, p["mlp.up_ef"], 1) + p.get("mlp.up_bias", 0)
    if model.mlp == "gelu":
        hidden = gelu_tanh(up)
    elif model.mlp == "gelu_exact":
        hidden = up * np.vectorize(lambda y: 0.5 * (1 + math.erf(y / math.sqrt(2))))(up)
    elif model.mlp == "relu2":
        hidden = relu2(up)
    elif model.mlp == "xielu":
        hidden = xielu(up, p["mlp.slopes.alpha_p"], p["mlp.slopes.alpha_n"])
    else:
        gate, value = gate_factor(model, up[:, :, 0]), up[:, :, 1]
        if model.mlp == "swiglu_clamped":
            gate, value = np.minimum(gate, CLAMP), np.clip(value, -CLAMP, CLAMP) + 1
        silu = gate / (1 + np.exp(-gate * (1.702 if model.mlp == "swiglu_clamped" else 1)))
        hidden = (gelu_tanh(gate) if model.mlp == "geglu" else silu) * value
    return model.mlp_out_factor * (hidden @ p["mlp.down_fe"] + p.get("mlp.down_bias", 0))


def gate_factor(model: Any, gate: np.ndarray) -> np.ndarray:
    """The gate in front of its activation."""
    return model.mlp_gate_factor * gate


def relu2(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) ** 2


def xielu(x: np.ndarray, alpha_p: np.ndarray, alpha_n: np.ndarray) -> np.ndarray:
    """Two parabolas that meet at 0 with the slope 1/2, the lower one bent to a line."""
    above = np.log1p(np.exp(alpha_p)) * x * x
    below = (0.5 + np.log1p(np.exp(alpha_n))) * (np.expm1(np.minimum(x, -1e-6)) - x)
    return np.where(x > 0, above, below) + 0.5 * x


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
