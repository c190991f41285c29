"""Updates from models of the released Megatron-core (scripts/wheels.py): 4 processes on gloo."""

import pytest

from python_client import refit
from sharded import Trainer

pytestmark = pytest.mark.usefixtures("nothing_left")
LAYOUTS = {
    "dense TP2 x PP2": ("qwen3", dict(tp=2, pp=2)),
    "TP2 x DP2, tied, biases": ("qwen2", dict(tp=2)),
    "mixture EP4": ("qwen3-moe", dict(ep=4)),
    "mixture PP2 x EP2": ("qwen3-moe", dict(pp=2, ep=2)),
    "mixture TP2 x ETP2, EP2": ("qwen3-moe", dict(tp=2, ep=2, etp=2)),
    "padded vocabulary, TP2 x DP2": ("llama", dict(tp=2, padding=96)),
}


@pytest.fixture(scope="module")
def trainer():
    made = Trainer(4)
    yield made
    made.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_arrives(trainer, engine_of, model_of, name, ranks):
    kind, parallel = LAYOUTS[name]
    engine, model = engine_of(kind, ranks), model_of(kind)
    trainer("megatron", kind=kind, folder=str(model.folder), **parallel)
    client = refit.Client(engine.url)
    for variant, transport in ((30, "handles"), (31, "group")):
        client.check_weights("reset_tensors")
        trainer("megatron_fill", variant=variant)
        options = dict(urls=[engine.url], version=f"{name} {variant}", what="chunks", layout="megatron")
        trainer("update", transport=transport, bucket_bytes=1 << 16, **options)
        assert client.checksums() == model.checksums(variant)
        assert client.weights() == {"state": "current"}
    trainer("leave")
