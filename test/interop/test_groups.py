"""Process groups of torch trainers (gloo) and a server: broadcasts arrive bit for bit on every rank of every engine."""

import itertools
import random
import time

import pytest

from distributed_group import DESTROY, INIT, UPDATE, Group, Watch, free_port
from groups import MODELS, footprint
from leaks import grown
from server import Refused

KIND = "qwen3"
UPDATED = "Succeeded to update parameter online."
WAYS = ["each", "bucket", "one-by-one"]


@pytest.mark.parametrize("layout", ["ta", "taa", "taaaa"])
@pytest.mark.parametrize("way", WAYS)
def test_weights_go_to_a_to_b_and_back_to_a(party, layout, way):
    group = party.group(KIND, layout)
    for reply in group.join().replies.values():
        assert reply == {"success": True, "message": "Succeeded to initialize custom process group."}
    party.spoil(group)
    for step, variant in enumerate([1, 2, 1]):
        reply = group.update(variant, way=way, weight_version=str(step)).ok().replies["a"]
        assert reply["success"] is True and reply["message"] == f"{UPDATED} Weight version updated to {step}."
        party.holds(group, KIND, variant)
    server = group.engines["a"]
    assert (
        server.post("/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}})["meta_info"][
            "weight_version"
        ]
        == "2"
    )
    left = group.leave().replies["a"]
    assert left == {"success": True, "message": "Succeeded to destroy custom process group."}


# Engines before, between and behind the trainers; two engines; ranks that forward what they receive.
@pytest.mark.parametrize(
    "layout", ["tat", "tta", "tab", "taat", "ttaa", "ttab", "tabt", "taabb", "tabbt", "ttaat", "ttabt"]
)
def test_groups_of_up_to_five(party, layout):
    group = party.group(KIND, layout)
    group.join()
    party.spoil(group)
    for variant, way in zip([1, 2, 1], ["each", "bucket", "one-by-one"]):
        group.update(variant, way=way).ok()
        party.holds(group, KIND, variant)
    group.leave()


@pytest.mark.parametrize("kind", MODELS)
def test_every_architecture_one_parameter_a_request(party, kind):
    group = party.group(kind, "taa")
    group.join()
    party.spoil(group)
    names = list(group.shapes)
    for name in names[:-1]:
        reply = group.update(7, [name], flush_cache=False).ok().replies["a"]
        assert reply["message"] == UPDATED
    assert group.engines["a"].metric("refit:weights_torn") == 1, "the last tensor is still missing"
    group.update(7, names[-1:]).ok()
    party.holds(group, kind, 7)
    random.Random(1).shuffle(names)
    for variant, way in [(8, "bucket"), (7, "each")]:
        group.update(variant, names, way).ok()
        party.holds(group, kind, variant)
    group.leave()


def test_values_of_another_dtype_are_converted(party):
    """float32 goes to a bfloat16 engine. Every value is exact in bfloat16, so it must arrive unchanged."""
    group = party.group(KIND, "taa")
    group.join()
    party.spoil(group)
    for way, spelled in [("each", "float32"), ("bucket", "torch.float32")]:
        announce = {name: (spelled, list(shape)) for name, shape in group.shapes.items()}
        group.update(3, way=way, announce=announce, sent=dict(dtype="float32")).ok()
        party.holds(group, KIND, 3)
        group.update(4, way=way).ok()
    group.leave()


def test_rounds_of_init_update_and_destroy_leak_nothing(party, request):
    rounds, port, variants = request.config.getoption("--rounds"), free_port(), itertools.cycle([1, 2])
    layouts = ["ta", "taa", "tab", "tat"]
    servers, before = {}, {}
    for number in range(rounds + len(layouts)):
        layout = layouts[number % len(layouts)]
        group = party.group(KIND, layout, name="again", port=port)
        if number == len(layouts):
            # By now every thread and heap of this kind of group has existed once.
            before = {key: footprint(server.process.pid) for key, server in servers.items()}
        group.join()
        for way in WAYS[: 1 + number % 3]:
            variant = next(variants)
            group.update(variant, way=way).ok()
        party.holds(group, KIND, variant)
        servers.update({(letter, layout.count(letter)): server for letter, server in group.engines.items()})
        group.leave()
        group.close()
    for key, (descriptors, threads) in before.items():
        more = grown(lambda key=key: footprint(servers[key].process.pid), (descriptors + 1, threads))
        assert not more, f"{key}: descriptors or threads, allowed and found after {rounds} rounds: {more}"


def test_two_groups_of_one_engine_at_once(party):
    """As with a group for each pipeline stage: both groups send their half of the tensors at the same time."""
    stages = [party.group(KIND, "taa", name=f"slime-pp_{stage}") for stage in range(2)]
    both = party.trainers_for(KIND, 2)
    names = list(stages[0].shapes)
    halves = [names[::2], names[1::2]]
    for group, process in zip(stages, both):
        group.trainers = [process]
        group.join()
    party.spoil(stages[0])
    for variant, way in [(1, "each"), (2, "bucket"), (1, "bucket")]:
        for group, half in zip(stages, halves):
            group.prepare(variant, half, way)
        asked = [group.announce(half, way, flush_cache=False) for group, half in zip(stages, halves)]
        for group in stages:
            group.begin_send()
        for group, replies in zip(stages, asked):
            (sent,) = group.end_trainers()
            assert not isinstance(sent, Exception), sent
            reply = replies["a"].result()
            assert not isinstance(reply, Exception), reply
        party.holds(stages[0], KIND, variant)
    stages[0].leave()
    stages[1].update(2, halves[1]).ok()
    stages[1].leave()


def test_the_trainer_may_join_after_the_engine(party):
    group = party.group(KIND, "taa")
    with Watch(group.engines["a"]):
        group.join(trainers_first=False, pause_s=1)
        group.prepare(5)
        asked = group.announce(list(group.shapes))
        time.sleep(1)
        # The wait for a late trainer delays no other request.
        generated = group.engines["a"].post(
            "/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        )
        assert len(generated["output_ids"]) == 4 and not asked["a"].done()
        group.begin_send()
        (sent,) = group.end_trainers()
    assert not isinstance(sent, Exception), sent
    assert asked["a"].result()["success"] is True
    party.holds(group, KIND, 5)
    group.leave()


def test_a_refused_update_is_received_first_and_the_group_goes_on(party):
    group = party.group(KIND, "taab")
    group.join()
    group.update(1).ok()
    names = list(group.shapes)
    odd = names[3]
    wrong = list(group.shapes[odd])
    wrong[0] += 1
    renamed = {"names": ["nobody" if name == odd else name for name in names]}
    cases = {
        "an unknown name": dict(body=lambda body: body | renamed, expected="nobody"),
        "a shape that the model has otherwise": dict(
            announce={odd: ("bfloat16", wrong)}, sent=dict(instead={odd: wrong}), expected=odd
        ),
        "a tensor twice": dict(names=[*names, names[0]], expected=names[0]),
        "no dtype of weights": dict(
            announce={odd: ("int64", list(group.shapes[odd]))}, sent=dict(dtypes={odd: "int64"}), expected="int64"
        ),
    }
    for way in ["each", "bucket"]:
        for case, told in cases.items():
            told = dict(told)
            expected, sent = told.pop("expected"), told.pop("sent", None)
            outcome = group.update(2, told.pop("names", names), way, sent=sent, weight_version="refused", **told)
            assert not [result for result in outcome.trainers if isinstance(result, Exception)], (
                f"{case}: the trainer's broadcasts were not taken"
            )
            for letter in group.engines:
                refusal = outcome.refusal(letter)
                assert refusal.status == 400 and expected in refusal.body, f"{case}: {refusal}"
            party.holds(group, KIND, 1)
    assert group.engines["a"].get("/get_weight_version")["weight_version"] != "refused"
    # The group still works.
    group.update(2).ok()
    party.holds(group, KIND, 2)
    group.leave()


def test_an_unreadable_body_ends_the_group_and_frees_the_trainer(party):
    """If the server cannot know what the trainer sends, it ends the group, so the trainer does not wait for ever."""
    for broken in [{"shapes": "none"}, {"names": ["model.norm.weight"]}, {"dtypes": 3}]:
        group = party.group(KIND, "ta", name="nothing", timeout_s=30)
        group.join()
        group.update(1).ok()
        outcome = group.update(2, body=lambda body: body | broken)
        refusal = outcome.refusal()
        assert refusal.status == 400 and next(iter(broken)) in refusal.body and "aborted" in refusal.body
        assert isinstance(outcome.trainers[0], Exception), "the trainer's broadcast failed, and it knows"
        party.holds(group, KIND, 1)
        # The group is broken, and a new init replaces it.
        group.trainers[0]("leave", group="nothing")
        group.join()
        group.update(2).ok()
        party.holds(group, KIND, 2)
        group.leave()


def test_the_replies_to_init_and_destroy(party):
    group = party.group(KIND, "ta")
    server = group.engines["a"]

    def refused(path, body):
        with pytest.raises(Refused) as refusal:
            server.post(path, body)
        return refusal.value

    nobody = refused(UPDATE, dict(names=["model.norm.weight"], dtypes=["bfloat16"], shapes=[[64]], group_name="nobody"))
    assert nobody.status == 404 and "nobody" in nobody.body and INIT in nobody.body
    absent = refused(DESTROY, dict(group_name="nobody"))
    assert absent.status == 400 and "The group to be destroyed does not exist." in absent.body
    group.join()
    again = server.post(INIT, group.place("a"))
    assert again["success"] is True, "the same once more does nothing"
    assert refused(INIT, group.place("a") | dict(rank_offset=2, world_size=3)).status == 409
    group.update(1).ok()
    party.holds(group, KIND, 1)
    group.leave()
    assert refused(DESTROY, dict(group_name=group.name)).status == 400
    for field, value in [
        ("world_size", 1),
        ("rank_offset", 5),
        ("master_port", 0),
        ("backend", "mpi"),
        ("master_address", "169.254.169.254"),
        ("group_name", ""),
    ]:
        assert 400 <= refused(INIT, group.place("a") | {field: value}).status < 500, field
    # AReaL sends the port as a string, and unknown fields.
    group.place = lambda letter: Group.place(group, letter) | dict(master_port=str(group.port), pp_rank=0)
    group.join()
    group.update(2).ok()
    group.leave()
