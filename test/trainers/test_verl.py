"""verl's teachers and its LoRA adapters, from its released wheel, through clients/python/refit_verl.py."""

import pytest
from engines import GOLDENS, ROOT
from peft_replies import FLAGS, PROMPTS, adapted, check

pytest.importorskip("ray", reason="verl's servers are Ray actors")
pytest.importorskip("pydantic", reason="verl's outputs are pydantic models")

SEQUENCE = [5, 6, 7, 8, 9, 10, 5, 6]


@pytest.fixture
def teachers(trainer):
    process = trainer("verl_teachers.py")
    environment = dict(
        REFIT_COMMAND=f"node {ROOT / 'bin/refit.js'}",
        REFIT_FLAGS="--dtype float32 --max-total-tokens 1024 --insecure",
        # The student's servers: no teacher may use one of them.
        REFIT_URLS="http://127.0.0.1:1",
    )
    models = {"math": str(GOLDENS / "qwen3"), "org/code": str(GOLDENS / "llama")}
    names = process("start", models=models, ranks=1, environment=environment)
    yield process, names
    process("stop")


def test_two_teachers_score_the_students_tokens(teachers):
    """verl numbers the replicas of each teacher from 0; `topk` 0 scores the tokens themselves."""
    process, names = teachers
    assert {"sglang_server_teacher_0_0_math", "sglang_server_teacher_0_0_org_code"} <= set(names)
    assert len(set(process("addresses"))) == 2
    for best in [0, 4]:
        scores = {key: process("score", sequence=SEQUENCE, key=key, best=best) for key in ["math", "org/code"]}
        width = max(best, 1)
        for one in scores.values():
            assert one["ids"] == one["wanted"]["prompt_ids"]
            assert [pytest.approx(row) for row in one["wanted"]["prompt_logprobs"]] == one["logprobs"]
            assert [len(row) for row in one["ids"]] == [width] * len(SEQUENCE)
            assert one["ids"][-1] == [0] * width and one["logprobs"][-1] == [0.0] * width
            if best == 0:
                assert [row[0] for row in one["ids"][:-1]] == SEQUENCE[1:]
            else:
                assert all(row == sorted(row, reverse=True) for row in one["logprobs"])
        assert scores["math"]["logprobs"] != scores["org/code"]["logprobs"], "each teacher has its own model"


def test_its_vllm_worker_sends_the_base_once_and_then_adapters(trainer, engines, tmp_path):
    """Two steps in a row: the same tokens and logprobs as those of PEFT's folder, and PEFT's own logprobs."""
    engine = engines("qwen3", 1, "cpu", *FLAGS, "--max-lora-rank", 16, "--model-root", tmp_path)
    process = trainer("verl_lora.py")
    process("start", url=engine.url, rank=16)
    engine.spoil()
    base, spoilt = None, engine.checksums()
    for step, seed in enumerate((1, 2, 1), 1):
        process("step", seed=seed, step=step)
        assert engine.get("/server_info")["weights"] == "current" and engine.version() == str(step)
        assert base is None or engine.checksums() == base, "only the adapter was sent"
        base = engine.checksums()
        assert all(base[name] != spoilt[name] for name in base)
        model = adapted("qwen3", seed, rank=16)
        check(engine, "123", model)
        model.save_pretrained(tmp_path / str(step))
        engine.post("/load_lora_adapter", dict(lora_name="folder", lora_path=str(tmp_path / str(step))))
        first, second = engine.get("/adapters")["adapters"]
        assert {first["name"], second["name"]} == {"123", "folder"} and first["digest"] == second["digest"]
        for prompt in PROMPTS:
            reply = engine.post(
                "/generate",
                dict(
                    input_ids=prompt,
                    lora_path="folder",
                    return_logprob=True,
                    sampling_params=dict(max_new_tokens=6, temperature=0, ignore_eos=True),
                ),
            )
            logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
            assert process("generate", prompt=prompt) == dict(
                tokens=reply["output_ids"], logprobs=logprobs, step=step
            )
    process("stop")
