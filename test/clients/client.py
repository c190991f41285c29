"""A program with the generated Python client. mypy checks it, and it drives a server.

Arguments: URL, a folder of weights and two shards.
"""

import sys

from api import Api, Failed, Ok


def answer(api: Api) -> str:
    reply = api.generate({"text": "123+456=", "sampling_params": {"max_new_tokens": 8, "temperature": 0}})
    assert isinstance(reply, Ok) and not isinstance(reply.data, (str, list)), reply
    finish = reply.data["meta_info"]["finish_reason"]
    assert finish is not None and finish["type"] in ("stop", "length")
    return reply.data["text"]


def main(url: str, folder: str, shards: list[str]) -> None:
    api = Api(url)
    assert answer(api) != "579"

    disk = api.update_weights_from_disk({"model_path": folder, "weight_version": "python disk"})
    assert isinstance(disk, Ok) and disk.data["report"]["tensors"] > 0, disk
    assert answer(api) == "579"

    files = [open(shard, "rb").read() for shard in shards]
    form = api.update_weights_from_tensor_form({"weight_version": "python form", "file": files})
    assert isinstance(form, Ok) and form.data["report"]["tensors"] > 0, form

    for index, data in enumerate(files):
        sent = api.update_weights_from_tensor_bytes(
            data, query={"weight_version": f"python bytes {index}", "allow_missing": True}
        )
        assert isinstance(sent, Ok), sent
    version = api.weight_version()
    assert isinstance(version, Ok) and version.data["weight_version"] == "python bytes 1", version

    refused = api.update_weights_from_disk({"model_path": "/nowhere"})
    assert isinstance(refused, Failed) and refused.status == 400, refused
    error = refused.error["error"]
    assert not isinstance(error, str) and error["code"] == "CHECKPOINT_PATH" and "/nowhere" in error["message"], error

    wrong = api.generate({"text": "x", "sampling_params": {"max_new_tokens": "many"}})  # type: ignore[typeddict-item]
    assert isinstance(wrong, Failed) and wrong.error.get("param") == "sampling_params.max_new_tokens", wrong
    print(f"python: generated, updated from disk, by a form and by bytes; refused with {error['code']}")


main(sys.argv[1], sys.argv[2], sys.argv[3:])
