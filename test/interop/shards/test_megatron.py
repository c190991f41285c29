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
# These concern the trainer alone, so one width of the engine is enough: a case takes half a minute.
PIPELINES = {
    "tied under PP2, TP2, biases": ("qwen2", dict(tp=2, pp=2)),
    "VPP2 of PP2, TP2": ("qwen3-deep", dict(tp=2, pp=2, vpp=2)),
    "tied under PP4": ("qwen2-deep", dict(pp=4)),
    "tied under VPP2 of PP2, DP2": ("qwen2-deep", dict(pp=2, vpp=2)),
    "mixture VPP2 of PP2, EP2": ("qwen3-moe-deep", dict(pp=2, vpp=2, ep=2)),
    "stages of 1 and 3 layers, TP2": ("qwen3-deep", dict(tp=2, pp=2, first=1)),
}


@pytest.fixture(scope="module")
def trainer():
    made = Trainer(4, ["megatron_rank", "megatron.core.models.gpt.gpt_layer_specs"])
    yield made
    made.close()


CASES = [(name, ranks) for name in LAYOUTS for ranks in (1, 2)] + [(name, 2) for name in PIPELINES]


@pytest.mark.parametrize("name, ranks", CASES)
def test_megatron_arrives(trainer, engine_of, model_of, name, ranks):
    kind, parallel = (LAYOUTS | PIPELINES)[name]
    engine, model = engine_of(kind, ranks), model_of(kind)
    chunks = trainer("megatron", kind=kind, folder=str(model.folder), **parallel)
    assert all(len(own) == parallel.get("vpp", 1) for own in chunks)
    if "tied under" in name:
        copies = [names for own in chunks for names in own if "output_layer.weight" in names]
        assert len(copies) == 4 // parallel["pp"], "the ranks of the last stage have a copy of the embedding"
    client = refit.Client(engine.url)
    for variant, transport in ((30, "handles"), (31, "group")):
        client.check_weights("reset_tensors")
        trainer("megatron_fill", variant=variant)
        options = dict(urls=[engine.url], version=f"{name} {variant}", what="chunks", layout="megatron")
        answers = trainer("update", transport=transport, bucket_bytes=1 << 16, **options)
        assert answers[0]["tensors"] == len(model.shapes)
        assert client.checksums() == model.checksums(variant)
        assert client.weights() == {"state": "current"}
    trainer("leave")
