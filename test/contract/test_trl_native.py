"""TRL's asynchronous GRPO with a plain vLLM: pause, start, one packed update, finish, resume. It reads no status."""

import pytest

from conftest import card_count
from engines import Beside
from vllm_wire import WIRES, Sending, Session, on_cards

NATIVE = pytest.mark.row(32, "TRL / vLLM native")


class Client:
    """Its VLLMClient: one attempt, and the reply is ignored."""

    def __init__(self, engine):
        self.engine = engine

    def get(self, path):
        return Session(self.engine).request("GET", path)

    def post(self, path, body=None):
        return Session(self.engine).post(path, body)


@NATIVE
@pytest.mark.brings("group")
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_packed_update_with_generation_frozen(engines, wire, ranks):
    if wire == "nccl" and card_count() < 1 + ranks:
        pytest.skip(f"needs {1 + ranks} NVIDIA GPUs")
    engine = engines("qwen3", ranks, on_cards(wire))
    client = Client(engine)
    assert client.get("/v1/models")["data"][0]["max_model_len"] > 0
    assert client.get("/get_world_size")["world_size"] == ranks
    sender = Sending(engine, wire, lambda info: client.post("/init_weight_transfer_engine", dict(init_info=info)))
    body = dict(
        model="policy",
        prompt=[5, 6, 7],
        max_tokens=200,
        temperature=1.0,
        n=1,
        return_token_ids=True,
        logprobs=0,
        ignore_eos=True,
    )
    try:
        engine.spoil()
        for variant in [3, 1, 2, 1]:
            client.post("/pause?mode=keep")
            # Torn weights generate nothing and are reported at once. The first update repairs them.
            running = None if variant == 3 else Beside(lambda: client.post("/v1/completions", body))
            assert client.post("/start_weight_update", dict(is_checkpoint_format=True)) == {
                "message": "Weight update started"
            }
            sender.send(
                lambda lists: client.post("/update_weights", dict(update_info={**lists, "packed": True})),
                variant,
                list(engine.shapes),
                1 << 30,
            )
            assert client.post("/finish_weight_update") == {"message": "Weight update finished"}
            assert running is None or not running.done, "it waits for the resume"
            client.post("/resume")
            engine.holds(variant)
            if running is not None:
                choice = running.result()["choices"][0]
                assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 200
    finally:
        sender.close()
