"""verl and OpenRLHF drive an engine through Ray: clients/python/refit_verl.py and refit_openrlhf.py.

The tests call them as those trainers call their own actors: as Ray actors if ray is installed, else as plain classes.
"""

import asyncio
import os
import pathlib
import signal
import sys
import types

import pytest
import torch
from conftest import ROOT
from distributed_group import free_port
from server import Server, settled
from tensor_process import Process
from tensors import LocalSerializedTensor, dumps, serialize

from shim_actors import CLIENTS, FLAGS, GREEDY, Plain, actor_of, adder, engine, error_of, get, model, ray  # noqa: F401

import refit  # noqa: E402
import refit_openrlhf  # noqa: E402
import refit_verl  # noqa: E402

# --- OpenRLHF: row 21 ---


class Broadcaster:
    """The trainer's rank 0 in a torch process group over gloo instead of PyNccl: the same calls on a CPU."""

    def __init__(self, world):
        self.port, self.world = free_port(), world

    def join(self):
        from process_group import init_custom_process_group

        self.group = init_custom_process_group("gloo", f"tcp://127.0.0.1:{self.port}", self.world, 0, "openrlhf")

    def broadcast(self, tensor):
        torch.distributed.broadcast(tensor, 0, group=self.group)

    def leave(self):
        torch.distributed.destroy_process_group(self.group)


@pytest.mark.row(21, "OpenRLHF / NCCL, CUDA IPC")
@pytest.mark.brings("group")
def test_openrlhf_one_parameter_per_call(model, actor_of):
    """ppo_actor.py: _init_vllm_sync_group, and broadcast_to_vllm with two engines, the second with two ranks."""
    with (
        Server(model.folder, *FLAGS, "--skip-tokenizer-init") as one,
        Server(model.folder, *FLAGS, "--tp", 2, "--skip-tokenizer-init") as two,
    ):
        engines = [actor_of(refit_openrlhf.RolloutActor, url=server.url) for server in (one, two)]
        trainer = Broadcaster(4)
        place = "127.0.0.1", trainer.port
        joining = [
            engine.init_process_group.remote(*place, offset, 4, "openrlhf", backend="gloo", use_ray=False)
            for engine, offset in zip(engines, (1, 2))
        ]
        trainer.join()
        get(joining)
        for variant in (1, 2, 1):
            get([engine.reset_prefix_cache.remote() for engine in engines])
            named = model.tensors(variant)
            for count, (name, parameter) in enumerate(named, 1):
                refs = [
                    engine.update_weight.remote(
                        name, dtype=parameter.dtype, shape=parameter.shape, empty_cache=count == len(named)
                    )
                    for engine in engines
                ]
                trainer.broadcast(parameter)
                get(refs)
                if count == 1:
                    # A round is one update, so no request sees mixed weights.
                    assert one.get("/health")["transaction"]["writing"]
            for server in (one, two):
                assert server.checksums() == model.checksums(variant)
                assert server.get("/health")["transaction"] is None
        assert one.get("/get_weight_version")["weight_version"] == "openrlhf-3"
        trainer.leave()


@pytest.mark.cards(2)
@pytest.mark.row(21, "OpenRLHF / NCCL, CUDA IPC")
@pytest.mark.brings("group")
def test_openrlhf_one_parameter_per_call_over_nccl(model, actor_of):
    """Rank 0 of vLLM's communicator, on its own GPU."""
    with Server(
        model.folder, *FLAGS, "--device", "cuda", "--skip-tokenizer-init", env={"CUDA_VISIBLE_DEVICES": "1"}
    ) as server:
        actor, trainer, port = (
            actor_of(refit_openrlhf.RolloutActor, url=server.url),
            Process(None, pathlib.Path(__file__).with_name("broadcaster.py")),
            free_port(),
        )
        try:
            joining = actor.init_process_group.remote(
                "127.0.0.1", port, 1, 2, "openrlhf", backend="nccl", use_ray=False
            )
            trainer("join", backend="nccl", name="openrlhf", address="127.0.0.1", port=port, rank=0, world=2)
            get(joining)
            names = list(model.shapes)
            for step, variant in enumerate((1, 2, 1), 1):
                for name in names:
                    shape = list(model.shapes[name])
                    ref = actor.update_weight.remote(
                        name, dtype=torch.bfloat16, shape=torch.Size(shape), empty_cache=name == names[-1]
                    )
                    # A single tensor is a chunk of plain bytes.
                    trainer("packed", variant=variant, tensors=[(name, shape)])
                    get(ref)
                assert server.checksums() == model.checksums(variant)
                assert server.get("/get_weight_version")["weight_version"] == f"openrlhf-{step}"
        finally:
            trainer.kill()


@pytest.mark.row(21, "OpenRLHF / NCCL, CUDA IPC")
@pytest.mark.brings("group")
def test_openrlhf_an_unknown_parameter_is_an_error_of_its_call_and_may_be_sent_again(model, engine, actor_of):
    actor = actor_of(refit_openrlhf.RolloutActor, url=engine.url)
    trainer = Broadcaster(2)
    joining = actor.init_process_group.remote("127.0.0.1", trainer.port, 1, 2, "openrlhf", "gloo", False)
    trainer.join()
    get(joining)
    named = model.tensors(3)
    ref = actor.update_weight.remote("no.such.weight", dtype=torch.bfloat16, shape=torch.Size([4]))
    trainer.broadcast(torch.zeros(4, dtype=torch.bfloat16))
    assert "no.such.weight" in error_of(ref)
    # The next round sends everything, from the first parameter on.
    for count, (name, parameter) in enumerate(named, 1):
        ref = actor.update_weight.remote(name, dtype=parameter.dtype, shape=parameter.shape, empty_cache=False)
        trainer.broadcast(parameter)
        get(ref)
    assert engine.checksums() == model.checksums(3)
    trainer.leave()


@pytest.mark.row(21, "OpenRLHF / NCCL, CUDA IPC")
def test_openrlhf_handles_are_read_up_to_the_missing_gpu(model, engine, actor_of):
    """_handle_cuda_ipc: reduce_tensor's tuples under the UUIDs of all GPUs.

    An engine on the CPU cannot read this GPU.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    actor, (name, weight) = actor_of(refit_openrlhf.RolloutActor, url=engine.url), model.tensors(4)[0]
    arguments = (
        torch.Tensor,
        weight.shape,
        weight.stride(),
        0,
        torch.UntypedStorage,
        weight.dtype,
        0,
        b"\2c" + bytes(64),
        weight.nbytes,
        0,
        b"/1234_1_0",
        0,
        bytes(64),
        True,
        False,
    )
    handles = {"11111111-2222-3333-4444-555555555555": (rebuild_cuda_tensor, arguments)}
    text = error_of(
        actor.update_weight_cuda_ipc.remote(
            name, dtype=weight.dtype, shape=weight.shape, ipc_handles=handles, empty_cache=False
        )
    )
    assert "handles of memory on GPUs" in text, text


@pytest.mark.cards(1)
@pytest.mark.row(21, "OpenRLHF / NCCL, CUDA IPC")
@pytest.mark.brings("memory")
def test_openrlhf_handles_of_a_gpu(model, actor_of):
    from torch.multiprocessing.reductions import reduce_tensor

    with Server(model.folder, *FLAGS, "--device", "cuda", "--skip-tokenizer-init") as server:
        actor, named = actor_of(refit_openrlhf.RolloutActor, url=server.url), model.tensors(4)
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        for count, (name, parameter) in enumerate(named, 1):
            weight = parameter.cuda()
            torch.cuda.synchronize()
            about = dict(
                dtype=weight.dtype,
                shape=weight.shape,
                ipc_handles={uuid: reduce_tensor(weight)},
                empty_cache=count == len(named),
            )
            get(actor.update_weight_cuda_ipc.remote(name, **about))
        assert server.checksums() == model.checksums(4)
        assert server.get("/get_weight_version")["weight_version"] == "openrlhf-1"


@pytest.mark.row(21, "OpenRLHF / NCCL, CUDA IPC")
def test_openrlhf_sleeps_wakes_pauses_and_generates(adder, actor_of):
    actor = actor_of(refit_openrlhf.RolloutActor, url=adder.url)
    ids = adder.post("/tokenize", dict(prompt="123+456="))["tokens"]
    output = get(actor.generate.remote(ids, GREEDY))
    first = output.outputs[0]
    assert first.text.startswith("579") and output.prompt_token_ids == ids
    assert first.finish_reason in ("stop", "length")
    assert [list(one) for one in first.logprobs] == [[token] for token in first.token_ids]
    assert all(one[token].logprob <= 0 for one, token in zip(first.logprobs, first.token_ids))
    # A request over a pause is frozen, and its result is the same.
    long = types.SimpleNamespace(**{**vars(GREEDY), "max_tokens": 200, "ignore_eos": True})
    wanted = get(actor.generate.remote(ids, long)).outputs[0].token_ids
    running = actor.generate.remote(ids, long)
    get(actor.pause_generation.remote())
    assert adder.get("/health")["paused"] == "in_place"
    get(actor.resume_generation.remote())
    assert get(running).outputs[0].token_ids == wanted
    assert get(actor.get_num_unfinished_requests.remote()) == 0
    get(actor.sleep.remote(level=2))
    assert not refit.Client(adder.url).ready()
    get(actor.wake_up.remote(tags=["weights"]))
    assert refit.Client(adder.url).weights()["state"] == "torn"
    refit.Client(adder.url).update_from_disk(ROOT / "models/adder")
    get(actor.wake_up.remote(tags=["kv_cache"]))
    assert get(actor.generate.remote(ids, GREEDY)).outputs[0].text.startswith("579")
    assert "text alone" in error_of(actor.generate.remote(ids, GREEDY, {"image": [1]}))


# --- verl: rows 7 and 8 through the shim ---


def rollout_config(**own):
    """The parts of verl's configuration that the shim reads."""
    return types.SimpleNamespace(
        **{**dict(max_model_len=512, prompt_length=64, response_length=16, free_cache_engine=True), **own}
    )


@pytest.mark.row(7, "verl / naive SGLang")
@pytest.mark.brings("memory")
def test_verl_hybrid_round_through_the_shim(model, engine, actor_of):
    """sglang_rollout.py: the worker finds the actor by name, gets its address, and posts weights there.

    The rest is Ray.
    """
    server = actor_of(refit_verl.RefitServer, name="sglang_server_0_0", config=rollout_config(), url=engine.url)
    get(server.launch_server.remote(master_address=None, master_port=None))
    found = ray.get_actor("sglang_server_0_0") if ray else server
    assert tuple(get(found.get_server_address.remote())) == ("127.0.0.1", engine.port)
    for step, variant in enumerate((1, 2), 1):
        get(server.sleep.remote())
        assert engine.get("/health")["status"] == "asleep"
        engine.post("/resume_memory_occupation", dict(tags=["weights"]))
        named = model.tensors(variant)
        for bucket in (named[:7], named[7:]):
            payload = serialize([(name, LocalSerializedTensor([dumps(tensor)])) for name, tensor in bucket])
            engine.post(
                "/update_weights_from_tensor",
                dict(serialized_named_tensors=[payload], load_format=None, flush_cache=True),
            )
        engine.request("GET", "/flush_cache")
        get(server.set_global_steps.remote(step))
        engine.post("/resume_memory_occupation", dict(tags=["kv_cache"]))
        assert engine.checksums() == model.checksums(variant)
        assert engine.get("/get_weight_version")["weight_version"] == str(step)
        output = get(
            server.generate.remote(
                prompt_ids=[1, 2, 3],
                sampling_params=dict(temperature=0.0, logprobs=True, ignore_eos=True),
                request_id=f"r{step}",
            )
        )
        assert len(output.token_ids) == len(output.log_probs) == 16 and output.stop_reason == "length"
        assert output.extra_fields["global_steps"] == step and output.extra_fields["weight_version"] == str(step)
    assert "hybrid" in error_of(server.wake_up.remote())


@pytest.mark.row(8, "verl / disaggregated")
def test_verl_disaggregated_abort_and_resume_through_the_shim(adder, actor_of):
    """checkpoint_engine's manager: abort_all, release kv_cache, update, resume kv_cache, resume.

    A partial rollout ends as `abort` with its tokens.
    """
    server = actor_of(
        refit_verl.RefitServer,
        config=rollout_config(max_model_len=2000, response_length=1900),
        mode="standalone",
        url=adder.url,
    )
    get(server.launch_server.remote())
    get(server.set_global_steps.remote(0))
    # It may end before the abort.
    for attempt in range(10):
        before = adder.metric("refit:generation_tokens_total")
        running = server.generate.remote(
            [5, 6, 7], dict(temperature=0.0, ignore_eos=True), f"long-{attempt}", image_data=None, video_data=None
        )
        settled(lambda: adder.metric("refit:generation_tokens_total"), lambda count: count > before)
        get(server.abort_all_requests.remote(checkpoint_kv=False, timeout_s=30.0))
        partial = get(running)
        if partial.stop_reason == "abort":
            break
        get(server.resume_generation.remote())
    assert partial.stop_reason == "abort" and 0 < len(partial.token_ids) < 1900
    get(server.release_kv_cache.remote())
    get(server.resume_kv_cache.remote())
    get(server.resume_generation.remote())
    rest = get(
        server.generate.remote(
            [5, 6, 7, *partial.token_ids], dict(temperature=0.0, ignore_eos=True, max_new_tokens=5), "rest"
        )
    )
    assert len(rest.token_ids) == 5 and rest.stop_reason == "length"
    get(server.clear_kv_cache.remote())
    get(server.sleep.remote(reset_connector=False))
    get(server.wake_up.remote())
    assert "max_model_len" in error_of(server.generate.remote([1] * 2001, {}, "x"))
    assert "text alone" in error_of(server.generate.remote([1], {}, "x", image_data=[b""]))


@pytest.mark.row(7, "verl / naive SGLang")
def test_verl_colocated_without_a_trainer_starts_its_own_server(model, actor_of):
    """As for a reward model: the weights are the same after sleep."""
    command = f"node {ROOT / 'bin/refit.js'}"
    os.environ["REFIT_COMMAND"], os.environ["REFIT_FLAGS"] = (
        command,
        "--dtype bfloat16 --max-total-tokens 4096 --insecure",
    )
    server = Plain(
        refit_verl.RefitServer,
        config=rollout_config(max_model_len=200),
        model_path=str(model.folder),
        mode="colocated",
        ranks=2,
    )
    try:
        server.launch_server.remote().result(300)
        host, port = server.get_server_address.remote().result()
        client = refit.Client(f"http://{host}:{port}")
        before = client.checksums()
        server.sleep.remote().result(300)
        server.wake_up.remote().result(300)
        assert client.checksums() == before and client.ready() and client.ranks() == 2
        output = server.generate.remote([1, 2, 3], dict(temperature=0.0), "r").result(300)
        assert output.log_probs is None and len(output.token_ids) <= 16
    finally:
        server.made.shutdown()
        del os.environ["REFIT_COMMAND"], os.environ["REFIT_FLAGS"]


# Runs before the server: the first time it takes the port after the search for a free one and before the server
# listens.
THIEF = """
import os, socket, subprocess, sys
mark, flags = sys.argv[1], sys.argv[2:]
address, port = (flags[flags.index(name) + 1] for name in ("--host", "--port"))
if not os.path.exists(mark):
    thief = socket.socket()
    thief.bind((address, int(port)))
    thief.listen()
    held = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[thief.fileno()])
    with open(mark, "w") as file:
        file.write(str(held.pid))
os.execvp("node", ["node", REFIT, *flags])
"""


def test_verl_starts_its_server_on_another_port_if_the_first_is_taken(model, tmp_path, monkeypatch):
    thief, mark = tmp_path / "thief.py", tmp_path / "mark"
    thief.write_text(THIEF.replace("REFIT", repr(str(ROOT / "bin/refit.js"))))
    monkeypatch.setenv("REFIT_COMMAND", f"{sys.executable} {thief} {mark}")
    monkeypatch.setenv("REFIT_FLAGS", "--dtype bfloat16 --max-total-tokens 4096 --insecure")
    server = Plain(refit_verl.RefitServer, config=rollout_config(max_model_len=200), model_path=str(model.folder))
    try:
        server.launch_server.remote().result(300)
        host, port = server.get_server_address.remote().result()
        assert refit.Client(f"http://{host}:{port}").ready()
    finally:
        server.made.shutdown()
        os.kill(int(mark.read_text()), signal.SIGKILL)


def test_the_shims_name_what_they_do_not_support():
    with pytest.raises(ValueError, match="sync_with_ray"):
        asyncio.run(
            refit_openrlhf.RolloutActor.init_process_group(None, "127.0.0.1", 1, 1, 2, "g", "nccl", use_ray=True)
        )
