"""Checkpoints of random weights in the shapes of real models, or of any model whose folder exists.

Written with numpy-sized pieces through a few threads: a 16 GB checkpoint takes seconds on a machine with a GPU.
"""

import concurrent.futures
import json
import math
import pathlib
import shutil
import struct

import torch

ROPE = dict(rope_type="default", rope_theta=1000000.0)
COMMON = dict(
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_parameters=ROPE,
    attention_dropout=0.0,
    bos_token_id=1,
    eos_token_id=2,
    dtype="bfloat16",
)
# The fields of their authors' config.json that matter here.
REAL = {
    "qwen2.5-1.5b": dict(
        COMMON,
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    ),
    "qwen3-8b": dict(
        COMMON,
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
        tie_word_embeddings=False,
        attention_bias=False,
        max_position_embeddings=40960,
    ),
    "qwen3-30b-a3b": dict(
        COMMON,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        vocab_size=151936,
        tie_word_embeddings=False,
        attention_bias=False,
        max_position_embeddings=40960,
    ),
}
SHARD_BYTES = 2 << 30
WRITERS = 8


def tensors(config):
    """[(name, shape)] of a model of REAL (all its layers alike), in the order of its state_dict(); each expert
    separate, as in transformers 4."""
    h, d = config["hidden_size"], config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    found = [("model.embed_tokens.weight", (config["vocab_size"], h))]
    for n in range(config["num_hidden_layers"]):
        layer = []
        for p, rows in [("q", q), ("k", kv), ("v", kv)]:
            layer.append((f"self_attn.{p}_proj.weight", (rows, h)))
            if config["model_type"] == "qwen2":
                layer.append((f"self_attn.{p}_proj.bias", (rows,)))
        layer.append(("self_attn.o_proj.weight", (h, q)))
        if config["model_type"] != "qwen2":
            layer += [("self_attn.q_norm.weight", (d,)), ("self_attn.k_norm.weight", (d,))]
        if "num_experts" in config:
            i = config["moe_intermediate_size"]
            layer += [("mlp.gate.weight", (config["num_experts"], h))]
            for e in range(config["num_experts"]):
                layer += [
                    (f"mlp.experts.{e}.{p}_proj.weight", shape)
                    for p, shape in [("gate", (i, h)), ("up", (i, h)), ("down", (h, i))]
                ]
        else:
            i = config["intermediate_size"]
            layer += [
                (f"mlp.{p}_proj.weight", shape) for p, shape in [("gate", (i, h)), ("up", (i, h)), ("down", (h, i))]
            ]
        layer += [("input_layernorm.weight", (h,)), ("post_attention_layernorm.weight", (h,))]
        found += [(f"model.layers.{n}.{name}", shape) for name, shape in layer]
    found.append(("model.norm.weight", (h,)))
    if not config["tie_word_embeddings"]:
        found.append(("lm_head.weight", (config["vocab_size"], h)))
    return found


def size(shapes):
    """Bytes in bfloat16."""
    return 2 * sum(math.prod(shape) for _, shape in shapes)


def random_tensor(name, shape, seed, device):
    """Scaled so that activations keep their size through the layers and logits differ by several units: errors then
    show."""
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.randn(
        shape, generator=generator, device=device, dtype=torch.float32 if math.prod(shape) < 1 << 22 else torch.bfloat16
    )
    if "norm" in name:
        value = 1 + 0.1 * noise
    elif name.endswith("bias"):
        value = 0.1 * noise
    elif "embed_tokens" in name:
        # This is also the head if it is tied: with a wide embedding its logits would be too extreme.
        value = noise.mul_(3 / math.sqrt(shape[1]))
    else:
        value = noise.mul_((3 if "lm_head" in name else 1) / math.sqrt(shape[-1]))
    return value.to(torch.bfloat16)


def write_shard(path, entries, seed, device):
    """entries: [(name, shape, number)]."""
    header, end = {}, 0
    for name, shape, _ in entries:
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = dict(dtype="BF16", shape=list(shape), data_offsets=[begin, end])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape, number in entries:
            value = random_tensor(name, shape, seed * 1000003 + number, device).cpu()
            data = memoryview(value.reshape(-1).view(torch.uint8).numpy())
            while len(data) > 0:
                data = data[file.write(data) :]


def write(folder, config, shapes, seed, device="cpu"):
    """A folder with config.json and safetensors, sharded if it is large."""
    folder = pathlib.Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shards, room = [[]], SHARD_BYTES
    for number, (name, shape) in enumerate(shapes):
        if room < 2 * math.prod(shape) and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append((name, shape, number))
        room -= 2 * math.prod(shape)
    names = (
        [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        if len(shards) > 1
        else ["model.safetensors"]
    )
    with concurrent.futures.ThreadPoolExecutor(WRITERS) as pool:
        for done in [
            pool.submit(write_shard, folder / name, entries, seed, device) for name, entries in zip(names, shards)
        ]:
            done.result()
    if device != "cpu":
        torch.cuda.empty_cache()  # others on the card want that memory
    if len(shards) > 1:
        where = {entry[0]: name for name, entries in zip(names, shards) for entry in entries}
        index = dict(metadata=dict(total_size=size(shapes)), weight_map=where)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def hollow(folder, config, layers=None):
    """A checkpoint of zeros in sparse files, which take no room. For tests that replace all weights before they use
    them."""
    folder, config = pathlib.Path(folder), dict(config, **({} if layers is None else dict(num_hidden_layers=layers)))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    header, end = {}, 0
    for name, shape in tensors(config):
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = dict(dtype="BF16", shape=list(shape), data_offsets=[begin, end])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def headers(folder):
    """{name: (file, dtype, shape, first byte, last byte + 1)} of a checkpoint."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            for name, entry in json.loads(file.read(length)).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    found[name] = (path, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, 8 + length + end)
    return found


def reseeded(source, folder, seed):
    """The model of another folder with other weights."""
    config = json.loads((pathlib.Path(source) / "config.json").read_text())
    shapes = [(name, entry[2]) for name, entry in headers(source).items()]
    return write(folder, config, shapes, seed)


def real(name, folder, seed, device, layers=None):
    config = dict(REAL[name])
    if layers is not None:
        config["num_hidden_layers"] = layers
    return write(folder, config, tensors(config), seed, device)
