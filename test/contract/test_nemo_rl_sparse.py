"""NeMo-RL's remote sparse refit: compressed bit changes through S3, in the call order of its synchroniser."""

import concurrent.futures
import json
import time
import urllib.error
import urllib.request
import uuid

import pytest
import safetensors.torch
import torch
from sparse_refit import ACCESS, Failed, Store, Trainer, digest, encode, packed
from tensors import coded
from test_verl_delta import stepped

SPARSE = pytest.mark.row(27, "NeMo-RL / remote sparse")
BUCKET, REGION, API_KEY = "weights", "eu-west-1", "a key of the trainer's"


@pytest.fixture(scope="module")
def store():
    made = Store()
    yield made
    made.shutdown()


@pytest.fixture(params=[1, 2])
def trainer(request, engines, store):
    env = dict(ACCESS, AWS_ENDPOINT_URL_S3=f"http://127.0.0.1:{store.server_port}", REFIT_API_KEY=API_KEY)
    engine = engines("qwen3-moe", request.param, "cpu", which="s3", env=env)
    made = Trainer(engine, store)
    first = {name: coded(1, name, shape) for name, shape in engine.shapes.items()}
    whole(made, first)
    made.init(first)
    return made


def whole(trainer, weights):
    """The checkpoint that both sides start with."""
    body = safetensors.torch.save({name: tensor.contiguous() for name, tensor in weights.items()})
    request = urllib.request.Request(
        f"{trainer.engine.url}/update_weights_from_tensor",
        body,
        {"content-type": "application/octet-stream", "authorization": f"Bearer {API_KEY}"},
    )
    with urllib.request.urlopen(request) as reply:
        assert json.loads(reply.read())["success"] is True
    trainer.holds(weights)


@SPARSE
@pytest.mark.brings("body")
def test_changes_are_written_at_the_flush_forth_and_back(trainer):
    first = trainer.baseline
    assert trainer.overwrite == []
    second = stepped(first, 2)
    changes = list(trainer.changes(second))
    trainer.send(changes[:3])
    trainer.holds(first)
    trainer.send(changes[3:])
    assert trainer.post("flush", {})["payloads"] == 2
    trainer.holds(second)
    trainer.baseline = second
    for weights, operation in (
        (first, "xor"),
        (second, "overwrite"),
        (stepped(second, 3, share=0.7), "xor"),
        (first, "overwrite"),
    ):
        trainer.sync(weights, operation)
        trainer.holds(weights)
    # All elements of a tensor, which are one range; then an empty flush.
    third = {
        name: coded(9, name, tensor.shape) if index % 2 else tensor
        for index, (name, tensor) in enumerate(first.items())
    }
    trainer.sync(third)
    trainer.holds(third)
    assert trainer.post("flush", {})["payloads"] == 0
    trainer.holds(third)


@SPARSE
@pytest.mark.brings("body")
def test_a_payload_that_is_announced_twice_is_applied_once(trainer):
    """Two changes of a bit cancel out.

    The client posts a manifest again after a 502 or a lost reply; its key shows that.
    """
    first = trainer.baseline
    second = stepped(first, 2)
    changes = list(trainer.changes(second))
    assert trainer.send(changes, key="again")["payloads"] == 1
    again = trainer.send(changes, key="again")
    assert again["payloads"] == 0 and again["duplicate"] is True
    trainer.post("flush", {})
    trainer.holds(second)
    trainer.baseline = second
    trainer.store.fail[f"/{BUCKET}/later"] = 2
    trainer.send(list(trainer.changes(first)), key="later")
    trainer.post("flush", {})
    trainer.holds(first)


@SPARSE
@pytest.mark.brings("body")
def test_the_key_is_required_in_the_trainers_header(trainer):
    for key in (None, "another"):
        with pytest.raises(Failed, match="403: .*x-nemo-rl-refit-key"):
            trainer.post("flush", {}, key=key)


def wrong(first):
    """Wrong payloads by the text of their refusal: the changes or the payload, and the fields of the manifest."""
    name = "model.norm.weight"
    tensor, one = first[name], torch.tensor([1], dtype=torch.int16)
    at = torch.tensor
    good = [(name, tensor, at([0, 2]), one.repeat(2), "xor")]
    locations, values, items = encode(good)

    def told(**fields):
        return locations, values, [{**items[0], **fields}]

    yield "digest", good, dict(corrupt=lambda body: body[:-1] + bytes([body[-1] ^ 1]))
    yield "digest", good, dict(checksum="0" * 32)
    yield "checksum: expected", good, dict(checksum="no")
    yield "answers 404", good, dict(key="gone", corrupt=lambda body: None)
    yield "no name of a bucket", good, dict(bucket="a/b")
    yield "is no region", good, dict(region="evil.example.com/")
    yield "not prepared", [("model.no_such.weight", tensor, at([0]), one, "xor")], {}
    yield "was prepared as", [(name, torch.zeros(3, dtype=torch.bfloat16), at([0]), one, "xor")], {}
    yield "operation", told(operation="add"), {}
    yield "bytes 0 to 3 of 4", told(index_end=3), {}
    yield "bytes 0 to 6 of 4", told(index_end=6), {}
    yield "values are 0 to 9 of 2", told(value_end=9), {}
    yield "no group", told(value_group=1), {}
    yield "int32", (locations, (values[0].int(),), items), {}
    yield "index_encoding", told(index_encoding="bitmask"), {}
    yield "tuple of positions", [1, 2], {}
    yield "not a name that refit knows", (locations, values, [pytest.approx]), {}


@SPARSE
@pytest.mark.brings("body")
def test_a_wrong_payload_is_refused_and_ends_the_sync_until_the_next_prepare(trainer):
    """The client still flushes after a failure. An incomplete sync writes nothing."""
    first = trainer.baseline
    second = stepped(first, 2)
    changes = list(trainer.changes(second))
    for words, made, fields in wrong(first):
        trainer.send(changes[:2])
        corrupt, fields = fields.pop("corrupt", None), fields
        body = packed(encode(made) if isinstance(made, list) and isinstance(made[0], tuple) else made)
        key = fields.pop("key", f"wrong/{uuid.uuid4().hex}")
        stored = corrupt(body) if corrupt else body
        if stored is not None:
            trainer.store.put(key, stored)
        with pytest.raises(Failed, match=f"40[0-9]: .*{words}"):
            trainer.post("s3-manifest", dict(bucket=BUCKET, region=REGION, key=key, checksum=digest(body)) | fields)
        with pytest.raises(Failed, match="400: .*have not arrived"):
            trainer.post("flush", {})
        with pytest.raises(Failed, match="409: .*prepare again"):
            trainer.send(changes[:2])
        trainer.holds(first)
        trainer.init(first)
    for words, made in [
        (
            "outside of its",
            [
                (
                    "model.norm.weight",
                    first["model.norm.weight"],
                    torch.tensor([0, first["model.norm.weight"].numel()]),
                    torch.ones(2, dtype=torch.int16),
                    "xor",
                )
            ],
        ),
        (
            "comes twice",
            [
                (
                    "model.norm.weight",
                    first["model.norm.weight"],
                    torch.tensor([3]),
                    torch.ones(1, dtype=torch.int16),
                    "xor",
                )
            ]
            * 2,
        ),
    ]:
        trainer.send(changes[:2])
        trainer.send(made)
        with pytest.raises(Failed, match=f"400: .*{words}.*Nothing has changed"):
            trainer.post("flush", {})
        with pytest.raises(Failed, match="409: .*prepare again"):
            trainer.post("flush", {})
        trainer.holds(first)
        trainer.init(first)
    trainer.sync(second)
    trainer.holds(second)


@SPARSE
@pytest.mark.brings("body")
def test_changes_are_refused_if_the_weights_may_differ_from_the_trainers(trainer):
    """After another update of the weights, and for another model than the trainer's."""
    first = trainer.baseline
    second = stepped(first, 2)
    whole(trainer, first)
    with pytest.raises(Failed, match="409: .*another client has written weights.*prepare again"):
        trainer.send(list(trainer.changes(second)))
    with pytest.raises(Failed, match="400: .*no_such"):
        trainer.init({"model.no_such.weight": first["model.norm.weight"]})
    with pytest.raises(Failed, match="400: .*shape"):
        trainer.init({"model.norm.weight": torch.zeros(3, dtype=torch.bfloat16)})
    with pytest.raises(Failed, match="400: .*ZeroMQ"):
        trainer.post("zmq-flush", dict(transfer_id="t", expected_payloads=1))
    trainer.init({name: tensor.float() if name == "model.norm.weight" else tensor for name, tensor in first.items()})
    assert trainer.overwrite == ["model.norm.weight"]
    trainer.init(first)
    trainer.sync(second)
    trainer.holds(second)


def generating(engine):
    """Keeps a request running, so writes wait."""
    body = dict(input_ids=[5, 6, 7], sampling_params=dict(max_new_tokens=300, ignore_eos=True, temperature=0))
    request = urllib.request.Request(
        f"{engine.url}/generate",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {API_KEY}"},
    )
    return urllib.request.urlopen(request)


@SPARSE
@pytest.mark.brings("body")
def test_a_flush_that_is_posted_again_while_it_waits_joins_the_first(trainer):
    """The client posts again after 502 to 504 and after its own deadline. Bit changes that run twice cancel out."""
    second = stepped(trainer.baseline, 2)
    trainer.send(list(trainer.changes(second)))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = pool.submit(generating, trainer.engine)
        time.sleep(0.1)
        flushes = [pool.submit(trainer.post, "flush", {}) for _ in range(3)]
        done = [flush.result() for flush in flushes]
        running.result()
    assert 1 in [reply["payloads"] for reply in done]
    trainer.holds(second)


@SPARSE
@pytest.mark.brings("body")
def test_a_flush_after_another_update_changes_nothing(trainer):
    first = trainer.baseline
    second, third = stepped(first, 2), stepped(first, 3)
    for _ in range(10):
        trainer.send(list(trainer.changes(second)))
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            running = pool.submit(generating, trainer.engine)
            time.sleep(0.1)
            other = pool.submit(whole, trainer, third)
            time.sleep(0.3)
            flush = pool.submit(trainer.post, "flush", {})
            other.result()
            running.result()
        trainer.holds(third)
        if flush.exception() is not None:
            break
        # On a busy machine it may overtake the other update.
        whole(trainer, first)
        trainer.init(first)
    # The session notices it, or the write does if the flush waited behind the other update.
    with pytest.raises(Failed, match="409: .*another (client|update) has written weights"):
        flush.result()
    with pytest.raises(Failed, match="409: .*prepare again"):
        trainer.post("flush", {})
    trainer.init(third)
