"""LoRA adapters of random values in PEFT's form: a folder, the tensors, and the same merged into a reference model."""

import json
import math
import pathlib

import torch
from safetensors import safe_open
from safetensors.torch import save_file

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linears(folder):
    """{module: (out, in)} of the linears of a checkpoint, experts one by one."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                module = name.removesuffix(".weight")
                if module.rsplit(".", 1)[-1] in LINEARS and name.endswith(".weight"):
                    found[module] = tuple(file.get_slice(name).get_shape())
    return found


def adapter(shapes, rank, seed, size=0.5, device="cpu", dtype=torch.float32):
    """{name of PEFT: tensor}. `size`: of what it adds, relative to what the linear itself gives."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for module, (out, inner) in shapes.items():
        halves = (("A", (rank, inner), 1 / math.sqrt(inner)), ("B", (out, rank), size / math.sqrt(rank)))
        for end, shape, scale in halves:
            noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * scale
            # Values that bfloat16 holds, so that only the arithmetic differs from the reference.
            tensors[f"base_model.model.{module}.lora_{end}.weight"] = noise.to(torch.bfloat16).to(dtype)
    return tensors


def config(rank, alpha=None, targets=LINEARS):
    return dict(peft_type="LORA", r=rank, lora_alpha=alpha or rank, target_modules=list(targets), bias="none")


def write(folder, tensors, rank, alpha=None):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config(rank, alpha)))
    return folder


@torch.no_grad()
def merge(model, tensors, scale):
    """Adds scale * B A to the weights of transformers' model, whose experts are fused."""
    parameters = dict(model.named_parameters())
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = tensors[name.replace(".lora_A.", ".lora_B.")]
        weight = parameters.get(module + ".weight")
        if weight is None:
            layer, expert, part = module.split(".mlp.experts.")[0], *module.split(".mlp.experts.")[1].split(".")
            stacked = "down_proj" if part == "down_proj" else "gate_up_proj"
            fused = parameters[f"{layer}.mlp.experts.{stacked}"][int(expert)]
            half = fused.shape[0] // 2
            weight = fused if part == "down_proj" else fused[:half] if part == "gate_proj" else fused[half:]
        change = scale * (b.to(weight.device, torch.float32) @ a.to(weight.device, torch.float32))
        weight.copy_((weight.float() + change).to(weight.dtype))
