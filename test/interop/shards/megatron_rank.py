"""Models of the released Megatron-core in the ranks of shard_rank.py."""

import functools
import sys
import warnings

import torch
import torch.distributed as dist

from released import absent, folder_of
from tensor_weights import coded

sys.path[:0] = [str(folder_of(name)) for name in ("megatron-core", "einops")]
# A Triton kernel of its inference, which no CPU can run.
absent("megatron.core.inference.contexts.fused_kv_append_kernel")
if not torch.cuda.is_available():
    # The stages of a tied embedding move it to the GPU before they compare it.
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor


def head_dim(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def build(config, tp=1, pp=1, ep=1, etp=1, vpp=None, padding=128, first=None):
    """The chunks of this rank of a model with the shape of a transformers config. first: layers of the first stage."""
    from megatron.core import model_parallel_config, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    # A module of 0.15 warns without having imported it.
    model_parallel_config.warnings = warnings
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    sparse = getattr(config, "num_experts", None)
    more = {}
    if sparse:
        more = dict(
            num_moe_experts=sparse,
            moe_ffn_hidden_size=config.moe_intermediate_size,
            moe_router_topk=config.num_experts_per_tok,
            moe_token_dispatcher_type="allgather",
            moe_grouped_gemm=False,
        )
    settings = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_dim(config),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        qk_layernorm=config.model_type.startswith("qwen3"),
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_layers_in_first_pipeline_stage=first,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **more,
    )
    multiple = padding * tp
    vocabulary = -(-config.vocab_size // multiple) * multiple
    chunks = []
    for stage in range(vpp or 1):
        own = dict(vp_stage=stage) if vpp else {}
        chunks.append(
            GPTModel(
                config=settings,
                transformer_layer_spec=get_gpt_decoder_block_spec(settings, use_transformer_engine=False, **own),
                vocab_size=vocabulary,
                max_sequence_length=64,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **own),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **own),
                share_embeddings_and_output_weights=config.tie_word_embeddings,
                position_embedding_type="rope",
                **own,
            )
        )
    return chunks


def fill(chunks, config, shapes, variant, grids):
    """Gives each parameter its part of the coded checkpoint, by Megatron's own formulas (docs of its checkpoints).

    It computes places from the ranks alone, and shares no code with the client."""
    (tp, t), (etp, x), (ep, e) = grids

    @functools.cache
    def whole(name):
        return coded(variant, name, shapes[name])

    def rows(tensor, count, place):
        return tensor[tensor.shape[0] // count * place : tensor.shape[0] // count * (place + 1)]

    def cols(tensor, count, place):
        return tensor[:, tensor.shape[1] // count * place : tensor.shape[1] // count * (place + 1)]

    def gated(prefix, count, place):
        return torch.cat([rows(whole(f"{prefix}{part}_proj.weight"), count, place) for part in ("gate", "up")])

    def qkv(layer, kind):
        groups, head = config.num_key_value_heads, head_dim(config)
        q, k, v = (whole(f"{layer}self_attn.{part}_proj.{kind}") for part in "qkv")
        q = q.view(groups, -1, *q.shape[1:])
        k, v = (one.view(groups, head, *one.shape[1:]) for one in (k, v))
        mixed = torch.cat([q, k, v], dim=1)
        return rows(mixed.reshape(-1, *mixed.shape[2:]), tp, t)

    def vocabulary(name, like):
        tensor = whole(name)
        padded = torch.full((like.shape[0] * tp, tensor.shape[1]), 9.0, dtype=tensor.dtype)
        padded[: tensor.shape[0]] = tensor
        return rows(padded, tp, t)

    def value(name, layer, parameter):
        own = f"model.layers.{layer}."
        table = {
            "linear_qkv.weight": lambda: qkv(own, "weight"),
            "linear_qkv.bias": lambda: qkv(own, "bias"),
            "linear_proj.weight": lambda: cols(whole(own + "self_attn.o_proj.weight"), tp, t),
            "q_layernorm.weight": lambda: whole(own + "self_attn.q_norm.weight"),
            "k_layernorm.weight": lambda: whole(own + "self_attn.k_norm.weight"),
            "input_layernorm.weight": lambda: whole(own + "input_layernorm.weight"),
            "pre_mlp_layernorm.weight": lambda: whole(own + "post_attention_layernorm.weight"),
            "router.weight": lambda: whole(own + "mlp.gate.weight"),
        }
        for end, make in table.items():
            if name.endswith(end):
                return make()
        if "local_experts" in name:
            number = int(name.split("local_experts.")[1].split(".")[0]) + e * (config.num_experts // ep)
            prefix = f"{own}mlp.experts.{number}."
            if "fc1" in name:
                return gated(prefix, etp, x)
            return cols(whole(prefix + "down_proj.weight"), etp, x)
        if name.endswith("mlp.linear_fc1.weight"):
            return gated(own + "mlp.", tp, t)
        if name.endswith("mlp.linear_fc2.weight"):
            return cols(whole(own + "mlp.down_proj.weight"), tp, t)
        raise KeyError(name)

    with torch.no_grad():
        for chunk in chunks:
            numbers = {index: layer.layer_number - 1 for index, layer in enumerate(chunk.decoder.layers)}
            for name, parameter in chunk.named_parameters():
                if name.startswith("embedding.word"):
                    new = vocabulary("model.embed_tokens.weight", parameter)
                elif name == "output_layer.weight":
                    tied = config.tie_word_embeddings
                    new = vocabulary("model.embed_tokens.weight" if tied else "lm_head.weight", parameter)
                elif name == "decoder.final_layernorm.weight":
                    new = whole("model.norm.weight")
                else:
                    new = value(name, numbers[int(name.split("layers.")[1].split(".")[0])], parameter)
                assert new.shape == parameter.shape, (name, new.shape, parameter.shape)
                parameter.copy_(new)


def places():
    """(size, place) of this rank in each axis, from Megatron's groups."""
    from megatron.core import parallel_state as state

    groups = (
        state.get_tensor_model_parallel_group(),
        state.get_expert_tensor_parallel_group(),
        state.get_expert_model_parallel_group(),
    )
    return [(dist.get_world_size(group), dist.get_rank(group)) for group in groups]
