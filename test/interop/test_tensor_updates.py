"""/update_weights_from_tensor with real torch: tensors arrive bit for bit on every rank, and nothing leaks."""

import gc
import http.client
import json
import os
import signal

import pytest
import torch
from leaks import grown
from tensors import (
    MODELS,
    LocalSerializedTensor,
    Refused,
    bucket,
    checksums,
    coded,
    descriptors,
    dumps,
    file_count,
    mappings,
    metric,
    post,
    resident,
    serialize,
    shared_files,
    update,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def copies(named):
    """Pickles as from another process.

    Two pickles of one tensor are equal, and the server counts them as one sent twice.
    """
    return [(name, tensor.clone()) for name, tensor in named]


def verl(named, ranks):
    return [serialize([(name, LocalSerializedTensor([dumps(tensor)] * ranks)) for name, tensor in named])] * ranks


SHAPES_OF_REQUEST = {
    "one entry for all": lambda named, ranks: ([serialize(named)], None),
    "the same entry per rank": lambda named, ranks: ([serialize(named)] * ranks, None),
    "an entry of its own per rank": lambda named, ranks: ([serialize(copies(named)) for _ in range(ranks)], None),
    "verl": lambda named, ranks: (verl(named, ranks), None),
    "slime": lambda named, ranks: ([serialize(bucket(named))] * ranks, "flattened_bucket"),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("way", SHAPES_OF_REQUEST)
def test_weights_go_to_a_to_b_and_back_to_a(served, ranks, way):
    server, model = served("qwen3", ranks)
    post(server, "/weights_checker", {"action": "reset_tensors"})
    for step, variant in enumerate([1, 2, 1]):
        named = model.tensors(variant)
        entries, load_format = SHAPES_OF_REQUEST[way](named, ranks)
        reply = update(server, entries, load_format=load_format, weight_version=str(step))
        assert reply["message"] == f"Success Weight version updated to {step}."
        assert reply["report"]["missing"] == [] and reply["report"]["tensors"] == len(named)
        assert checksums(server) == model.checksums(variant)
    assert (
        post(server, "/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}})["meta_info"][
            "weight_version"
        ]
        == "2"
    )


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_architecture(served, kind, ranks):
    server, model = served(kind, ranks)
    post(server, "/weights_checker", {"action": "reset_tensors"})
    # One parameter a request, as in verl's smallest buckets.
    for name, tensor in model.tensors(7):
        update(server, [serialize([(name, tensor)])], flush_cache=False)
    assert checksums(server) == model.checksums(7)
    for variant in [8, 7]:
        update(server, [serialize(bucket(model.tensors(variant)))] * ranks, load_format="flattened_bucket")
        assert checksums(server) == model.checksums(variant)


@pytest.mark.parametrize("ranks", [1, 2])
def test_views_are_copied_as_torch_sees_them(served, ranks):
    server, model = served("qwen3", ranks)

    def transposed(tensor):
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor

    def stepped(tensor):
        padded = torch.full((*tensor.shape[:-1], tensor.shape[-1] * 3), float("nan"), dtype=tensor.dtype)
        padded[..., ::3] = tensor
        return padded[..., ::3]

    def inside(tensor):
        around = torch.full([size + 5 for size in tensor.shape], float("nan"), dtype=tensor.dtype)
        around[tuple(slice(2, 2 + size) for size in tensor.shape)] = tensor
        return around[tuple(slice(2, 2 + size) for size in tensor.shape)]

    def parameter(tensor):
        return torch.nn.Parameter(tensor)

    def as_float(tensor):
        return tensor.float()

    for variant, view in enumerate([transposed, stepped, inside, parameter, as_float], 10):
        named = [(name, view(tensor)) for name, tensor in model.tensors(variant)]
        update(server, [serialize(named)])
        assert checksums(server) == model.checksums(variant), view.__name__
    # All are views of one storage: one file, with one reference per pickle.
    pool = torch.cat([tensor.flatten() for _, tensor in model.tensors(20)])
    named, at = [], 0
    for name, shape in model.shapes.items():
        count = torch.Size(shape).numel()
        named.append((name, pool[at : at + count].view(shape)))
        at += count
    entries = [serialize(named[rank::ranks]) for rank in range(ranks)]
    (file,) = shared_files()
    assert file_count(file) == 1 + ranks
    before = metric(server, "tensor_files_opened_total")
    update(server, entries)
    assert file_count(file) == 1, "the sender's own"
    assert metric(server, "tensor_files_opened_total") == before + 1
    assert checksums(server) == model.checksums(20)


def test_rank_local_experts_reach_every_rank(served):
    """slime with expert parallelism sends each rank only its own experts."""
    server, model = served("qwen3-moe", 2)
    post(server, "/weights_checker", {"action": "reset_tensors"})
    named = model.tensors(3)
    shared = [(name, tensor) for name, tensor in named if ".experts." not in name]
    update(server, [serialize(bucket(shared))] * 2, load_format="flattened_bucket")
    experts = [(name, tensor) for name, tensor in named if ".experts." in name]
    halves = [experts[: len(experts) // 2], experts[len(experts) // 2 :]]
    update(server, [serialize(bucket(half)) for half in halves], load_format="flattened_bucket")
    assert checksums(server) == model.checksums(3)
    # A rank without tensors, and a bucket that is empty for all ranks.
    update(server, [serialize(bucket([])), serialize(bucket(experts))], load_format="flattened_bucket")
    update(server, [serialize(bucket([]))] * 2, load_format="flattened_bucket")
    assert checksums(server) == model.checksums(3)


def engine_shards(model, variant, ranks):
    """For each rank the parameters of SGLang's model: q, k, v and gate, up are fused, and split by rows or columns."""
    weights = dict(model.tensors(variant))
    shards = []
    for rank in range(ranks):

        def rows(name):
            return weights[name].chunk(ranks, 0)[rank]

        def columns(name):
            return weights[name].chunk(ranks, 1)[rank]

        def kv(name):
            heads = weights[name].shape[0] // 2
            return weights[name].split(heads)[rank * 2 // ranks] if ranks > 2 else rows(name)

        def vocabulary(name):
            per_rank = (weights[name].shape[0] + 63) // 64 * 64 // ranks
            padded = torch.zeros(per_rank * ranks, weights[name].shape[1], dtype=torch.bfloat16)
            padded[: weights[name].shape[0]] = weights[name]
            return padded.split(per_rank)[rank]

        own = {
            "model.embed_tokens.weight": vocabulary("model.embed_tokens.weight"),
            "model.norm.weight": weights["model.norm.weight"],
        }
        if "lm_head.weight" in weights:
            own["lm_head.weight"] = vocabulary("lm_head.weight")
        for layer in range(2):
            at = f"model.layers.{layer}."
            for name in weights:
                if name.startswith(at) and ("norm" in name or name.endswith("mlp.gate.weight")):
                    own[name] = weights[name]
            for end in ["weight", "bias"]:
                if f"{at}self_attn.q_proj.{end}" in weights:
                    parts = [rows(f"{at}self_attn.q_proj.{end}"), *(kv(f"{at}self_attn.{p}_proj.{end}") for p in "kv")]
                    own[f"{at}self_attn.qkv_proj.{end}"] = torch.cat(parts)
            own[f"{at}self_attn.o_proj.weight"] = columns(f"{at}self_attn.o_proj.weight")
            if f"{at}mlp.gate_proj.weight" in weights:
                own[f"{at}mlp.gate_up_proj.weight"] = torch.cat(
                    [rows(f"{at}mlp.gate_proj.weight"), rows(f"{at}mlp.up_proj.weight")]
                )
                own[f"{at}mlp.down_proj.weight"] = columns(f"{at}mlp.down_proj.weight")
            else:
                expert = [f"{at}mlp.experts.{e}." for e in range(4)]
                own[f"{at}mlp.experts.w13_weight"] = torch.stack(
                    [torch.cat([rows(e + "gate_proj.weight"), rows(e + "up_proj.weight")]) for e in expert]
                )
                own[f"{at}mlp.experts.w2_weight"] = torch.stack([columns(e + "down_proj.weight") for e in expert])
        shards.append(list(own.items()))
    return shards


@pytest.mark.parametrize(
    "kind, ranks", [("qwen2", 1), ("qwen2", 2), ("qwen3", 1), ("qwen3", 2), ("qwen3", 4), ("qwen3-moe", 2)]
)
def test_direct_takes_the_parameters_of_each_rank(served, kind, ranks):
    server, model = served(kind, ranks)
    post(server, "/weights_checker", {"action": "reset_tensors"})
    shards = engine_shards(model, 5, ranks)
    reply = update(server, [serialize(shard) for shard in shards], load_format="direct")
    assert reply["report"]["missing"] == [], "what is fused covers all that it is made of"
    assert checksums(server) == model.checksums(5)
    if ranks > 1:
        with pytest.raises(Refused, match="not sent to rank 1"):
            update(
                server,
                [serialize(shards[0]), serialize([])] + [serialize(shard) for shard in shards[2:]],
                load_format="direct",
            )
        with pytest.raises(Refused, match="its own shards"):
            update(server, [serialize(shards[0])], load_format="direct")
    with pytest.raises(Refused, match="the model has no tensor"):
        update(
            server,
            [serialize([("model.layers.0.self_attn.q_proj.weight", torch.zeros(2, dtype=torch.bfloat16))])] * ranks,
            load_format="direct",
        )
    with pytest.raises(Refused, match=r"has shape \[1, 64\]"):
        update(
            server,
            [serialize([("model.norm.weight", torch.zeros(1, 64, dtype=torch.bfloat16))])] * ranks,
            load_format="direct",
        )
    assert checksums(server) == model.checksums(5)


def test_memory_and_descriptors_do_not_grow_over_many_updates(served, pytestconfig):
    server, model = served("qwen3", 2)
    pid = server.process.pid
    mine = os.getpid()

    def step(variant):
        named = model.tensors(variant % 2)
        if variant % 3 == 0:
            update(server, [serialize(bucket(named))] * 2, load_format="flattened_bucket")
        elif variant % 3 == 1:
            update(server, [serialize(named), serialize(copies(named))])
        else:
            # The last of the checks refuses it, after everything has been opened.
            with pytest.raises(Refused, match="no tensor"):
                update(server, [serialize([*named, ("nobody", torch.zeros(4, dtype=torch.bfloat16))])])

    for variant in range(10):
        step(variant)
    gc.collect()

    def held():
        return descriptors(pid), descriptors(mine), mappings(pid), mappings(mine)

    before = held()
    memory = resident(pid), resident(mine)
    for variant in range(4 * pytestconfig.getoption("--rounds")):
        step(variant)
        gc.collect()
        assert shared_files() == []
    more = grown(held, before)
    assert not more, f"before and after: {more}"
    assert resident(pid) - memory[0] < 64 << 20 and resident(mine) - memory[1] < 32 << 20
    assert metric(server, "tensor_files_opened_total") == metric(server, "tensor_files_closed_total") > 0
    update(server, [serialize(model.tensors(1))])
    assert checksums(server) == model.checksums(1)


def test_memory_may_be_reused_right_after_the_reply(served):
    server, model = served("qwen3", 2)
    tensors = dict(model.tensors(0))
    for variant in range(1, 8):
        for name, shape in model.shapes.items():
            tensors[name].copy_(coded(variant, name, shape))
        update(server, [serialize(list(tensors.items()))])
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
        assert checksums(server) == model.checksums(variant)


def test_the_same_body_twice_at_once_is_one_update(served):
    server, model = served("qwen3", 1)
    # On a busy machine the first update may end before the server has read the other bodies; another try follows then.
    for variant in range(12, 22):
        epoch = metric(server, "weight_epoch")
        replies = post_three_at_once(server, serialize(model.tensors(variant)), f"v{variant}")
        assert any(reply["success"] for reply in replies)
        assert metric(server, "weight_epoch") == epoch + 1
        assert checksums(server) == model.checksums(variant)
        if replies.count(replies[0]) == 3:
            break
    assert replies[0]["success"] and replies.count(replies[0]) == 3
    assert all(file_count(file) == 1 for file in shared_files())


def post_three_at_once(server, payload, version):
    """A stopped server finds all three bodies when it goes on, on connections that it has accepted before."""
    body = json.dumps({"serialized_named_tensors": [payload], "weight_version": version})
    connections = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(3)]
    for connection in connections:
        connection.request("GET", "/health")
        connection.getresponse().read()
    server.process.send_signal(signal.SIGSTOP)
    try:
        for connection in connections:
            connection.request("POST", "/update_weights_from_tensor", body, {"content-type": "application/json"})
    finally:
        server.process.send_signal(signal.SIGCONT)
    return [json.loads(connection.getresponse().read()) for connection in connections]


def test_a_tensor_of_four_shards_reaches_two_ranks_element_by_element(served):
    """FSDP splits by rows over four, tensor parallelism by columns over two. Compares every element."""
    server, model = served("llama", 2)
    name = "model.layers.1.self_attn.o_proj.weight"
    whole = coded(21, name, model.shapes[name])
    shards = [shard.clone() for shard in whole.chunk(4, 0)]
    update(server, [serialize([(name, torch.cat(shards))])])
    got = torch.tensor(post(server, "/get_weights_by_name", {"name": name, "truncate_size": whole.shape[0]}))
    assert torch.equal(got, whole.float())
