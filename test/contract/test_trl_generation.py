"""How TRL generates with vLLM and with its own server. The requests and the read parts of replies are its own."""

import pytest
import torch
from server import ROOT, Server
from vllm_generation import (  # noqa: F401
    LONG,
    PROMPT,
    SKYRL,
    Control,
    Over,
    at_ease,
    begun,
    generate,
    in_the_midst,
    read,
    steered,
    still,
    update,
)

TRL_SERVE = pytest.mark.row(31, "TRL / `trl vllm-serve`")
TRL = pytest.mark.row(32, "TRL / vLLM native")


@pytest.fixture(scope="module")
def talking():
    """A trained model with its tokenizer and template."""
    server = Server(ROOT / "models/adder-base", "--threads", 2, "--max-total-tokens", 2048)
    yield server
    server.stop()


def trl_rows(logprobs):
    """Reads the logprobs of completions as TRL does: by token id, best first."""
    rows = []
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        items = sorted({token: logprob, **(top or {})}.items(), key=lambda item: -item[1])
        rows.append([(int(name.removeprefix("token_id:")), score) for name, score in items])
    return rows


@TRL
def test_trl_generates_by_completions_and_chat(talking):
    model = talking.get("/v1/models")["data"][0]["id"]
    assert talking.get("/get_world_size")["world_size"] == 1
    common = dict(
        model=model,
        n=2,
        repetition_penalty=1.0,
        temperature=0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_tokens=6,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )
    choices = talking.post("/v1/completions", dict(prompt=["1+2=", "30+4="], logprobs=2, **common))["choices"]
    assert len(choices) == 4
    for prompt, choice in zip(["1+2=", "1+2=", "30+4=", "30+4="], choices, strict=True):
        assert (
            choice["prompt_token_ids"]
            == talking.post("/tokenize", dict(model=model, prompt=prompt, add_special_tokens=True))["tokens"]
        )
        rows = trl_rows(choice["logprobs"])
        assert [row[0][0] for row in rows] == choice["token_ids"], "greedy: the token is the best"
        assert all(len(row) in (2, 3) for row in rows)
    message = [dict(role="user", content="1+2=")]
    reply = talking.post("/v1/chat/completions", dict(messages=message, logprobs=True, top_logprobs=0, **common))
    rendered = talking.post("/v1/chat/completions/render", dict(model=model, messages=message, max_tokens=1))
    assert reply["prompt_token_ids"] == rendered["token_ids"] and rendered["features"] is None
    for choice in reply["choices"]:
        assert [int(entry["token"].removeprefix("token_id:")) for entry in choice["logprobs"]["content"]] == choice[
            "token_ids"
        ]
    assert talking.post("/reset_prefix_cache")["success"] is True


@TRL
@TRL_SERVE
def test_trl_scores_sequences_as_a_teacher(talking):
    """By completions with prompt_logprobs, as TRL does now, and by the route of its older server."""
    ids = talking.post("/tokenize", dict(prompt="12+34=46"))["tokens"]
    sequences, lengths = [ids, ids[:-2]], [3, 2]
    choices = talking.post("/v1/completions", dict(prompt=sequences, max_tokens=1, temperature=1.0, prompt_logprobs=4))[
        "choices"
    ]
    now = []
    for choice, sequence, length in zip(choices, sequences, lengths, strict=True):
        rows = []
        for position in range(length, len(choice["prompt_logprobs"])):
            scores = choice["prompt_logprobs"][position]
            assert str(sequence[position]) in scores
            rows.append(
                [
                    (int(token), entry["logprob"])
                    for token, entry in sorted(scores.items(), key=lambda item: item[1]["rank"])
                ]
            )
        now.append(rows)
    reply = talking.post(
        "/get_sequence_logprobs/",
        dict(sequences=sequences, prompt_lengths=lengths, top_logprobs=4, temperature=1.0, response_format="json"),
    )
    before = [
        [list(zip(tokens, scores, strict=True)) for tokens, scores in zip(*rows, strict=True)]
        for rows in zip(reply["logprob_token_ids"], reply["logprobs"], strict=True)
    ]
    assert before == now
    binary = talking.post(
        "/get_sequence_logprobs/",
        dict(sequences=sequences, prompt_lengths=lengths, top_logprobs=4, temperature=1.0, response_format="binary"),
    )
    import base64

    array = lambda name, dtype: torch.frombuffer(bytearray(base64.b64decode(binary[name])), dtype=dtype)  # noqa: E731
    scores = array("logprobs_b64", torch.float32).reshape(binary["shape"])
    tokens = array("token_ids_b64", torch.int32).reshape(binary["shape"])
    assert binary["completion_lengths"] == [len(rows) for rows in now]
    for sequence, rows in enumerate(now):
        for position, row in enumerate(rows):
            assert tokens[sequence, position].tolist() == [token for token, _ in row[:4]]
            assert torch.allclose(scores[sequence, position], torch.tensor([score for _, score in row[:4]]))


@TRL_SERVE
def test_trl_vllm_serve_generates(talking):
    """TRL's own server: paths end in a slash, and replies are parallel lists."""
    assert talking.get("/health/")["status"] == "ok"
    assert talking.get("/get_world_size/") == {"world_size": 1}
    fields = dict(
        n=2,
        repetition_penalty=1.0,
        temperature=0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        max_tokens=5,
        logprobs=1,
        structured_outputs_regex=None,
        generation_kwargs={},
    )
    reply = talking.post("/generate/", dict(prompts=["1+2=", "30+4="], images=None, **fields))
    assert reply["prompt_ids"] == [
        talking.post("/tokenize", dict(prompt=prompt))["tokens"] for prompt in ("1+2=", "30+4=")
    ]
    assert len(reply["completion_ids"]) == len(reply["logprobs"]) == len(reply["logprob_token_ids"]) == 4
    for ids, scores, tokens in zip(reply["completion_ids"], reply["logprobs"], reply["logprob_token_ids"], strict=True):
        assert [row[0] for row in tokens] == ids and [len(row) for row in scores] == [len(row) for row in tokens]
        assert all(row == sorted(row, reverse=True) for row in scores)
    again = talking.post("/generate/", dict(prompts=reply["prompt_ids"], **fields))
    assert again["completion_ids"] == reply["completion_ids"], "token ids are taken as they are"
    chat = talking.post(
        "/chat/", dict(messages=[[dict(role="user", content="1+2=")]], tools=None, chat_template_kwargs={}, **fields)
    )
    assert len(chat["prompt_ids"]) == 1 and len(chat["completion_ids"]) == 2
