"""The names of activations in config.json, and the mlps that they make."""

# Without a gate, and with one.
PLAIN = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu_exact"}
SILU = {"silu": "swiglu", "swish": "swiglu"}
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
