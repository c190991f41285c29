"""verl's teachers, from its released wheel, in front of refit through clients/python/refit_verl.py."""

import pytest
from engines import GOLDENS, ROOT

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
