"""Seeded LoRA adapters of a tiny checkpoint, as PEFT writes them, and the weights with an adapter merged in."""

import numpy as np

import weights

# Model, then name, of every adapter: one on all products, one on a few of them with the scale of rsLoRA.
ADAPTERS = {
    "llama3": {
        "all": {"r": 4, "lora_alpha": 8, "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
        "few": {"r": 8, "lora_alpha": 8, "use_rslora": True, "targets": ["q_proj", "v_proj", "down_proj"]},
    },
}


def config(model, adapter):
    """adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "r": adapter["r"],
        "lora_alpha": adapter["lora_alpha"],
        "target_modules": adapter["targets"],
        "use_dora": False,
        "use_rslora": adapter.get("use_rslora", False),
    }


def tensors(base, adapter, seed):
    """Name to float32 array. B is not zero, as it would be before training: answers must differ from the base's."""
    draw, out = weights.Draw(seed), {}
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if module.rsplit(".")[-1] not in adapter["targets"]:
            continue
        outputs, inputs = weight.shape
        out[f"base_model.model.{module}.lora_A.weight"] = draw.matrix(adapter["r"], inputs)
        out[f"base_model.model.{module}.lora_B.weight"] = draw.uniform((outputs, adapter["r"]), 0.25)
    return out


def merged(base, adapter, tensors):
    """The base's weights in float64, W + scale * B A where there is a pair."""
    rank = adapter["r"]
    scale = adapter["lora_alpha"] / (rank**0.5 if adapter.get("use_rslora") else rank)
    out = dict(base)
    for name in base:
        halves = [f"base_model.model.{name.removesuffix('.weight')}.lora_{half}.weight" for half in "AB"]
        if halves[0] in tensors:
            a, b = (tensors[half].astype(np.float64) for half in halves)
            out[name] = base[name].astype(np.float64) + scale * (b @ a)
    return out
