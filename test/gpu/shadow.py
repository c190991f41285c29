"""Updates into a second set of weights (--shadow-weights) while requests run: nothing stops, nothing is torn, and each
set is bit for bit a freshly loaded engine when its turn has come."""

import threading
import time

import models
from harness import check, test
from machine import cards, device_flags, room
from reference import prompts
from server import ROOT, Refused, Server
from tensor_setup import check_given_back, check_sums, post, sender_of, shapes_of
from updates import answers, check_same

GOLDENS = ROOT / "test/goldens"
TOKENS = 4096


class Streams:
    """Requests that run one after another on several threads until the end; keeps all replies."""

    def __init__(self, server, count, length, vocabulary):
        self.replies, self.errors, self.ended = [], [], False

        def run(prompt):
            while not self.ended:
                body = dict(
                    input_ids=prompt, sampling_params=dict(max_new_tokens=length, temperature=0, ignore_eos=True)
                )
                try:
                    self.replies.append(server.post("/generate", body, timeout=120))
                except Exception as error:
                    self.errors.append(error)
                    return

        self.threads = [
            threading.Thread(target=run, args=(prompt,)) for prompt in prompts(5, (12,) * count, vocabulary)
        ]
        for thread in self.threads:
            thread.start()

    def end(self, length):
        self.ended = True
        for thread in self.threads:
            thread.join()
        check(not self.errors, f"{len(self.errors)} requests failed, first {self.errors[:1]}")
        check(
            all(len(reply["output_ids"]) == length for reply in self.replies),
            "a request ended early",
        )
        return self.replies


def shadowed(options, ranks, model, *more):
    flags, env = device_flags(options, ranks)
    flags += ["--dtype", "bfloat16"] if options.device == "cpu" else []
    flags += ["--shadow-weights", "--max-total-tokens", TOKENS, "--model-root", GOLDENS]
    return Server(model, *flags, *more, env=env)


def last_updates(server, count):
    listed = server.get(f"/updates?limit={count}")["updates"]
    check(len(listed) == count, f"{len(listed)} of {count} updates are listed")
    return listed


def while_requests_run(name):
    def run(options):
        with room(options) as place:
            folders = [GOLDENS / name, models.reseeded(GOLDENS / name, place / "second", 99)]
            spread = 0
            for ranks in [1, 2] + ([4] if cards() >= 4 else []):
                flags, env = device_flags(options, ranks)
                flags += ["--dtype", "bfloat16"] if options.device == "cpu" else []
                fresh = []
                for folder in folders:
                    with Server(folder, *flags, "--max-total-tokens", TOKENS, env=env) as server:
                        fresh.append(answers(server, 320, (2, 40)))
                check(fresh[0]["scores"] != fresh[1]["scores"], "the two models answer alike")
                with shadowed(options, ranks, folders[0], "--model-root", place) as server:
                    streams, count = Streams(server, 6, 150, 320), 24
                    for turn in range(count):
                        reply = server.post(
                            "/update_weights_from_disk",
                            dict(
                                model_path=str(folders[(turn + 1) % 2]),
                                weight_version=f"turn-{turn}",
                                swap="demand",
                                flush_cache=turn % 3 == 0,
                            ),
                        )
                        check(reply["report"]["ms"]["swap"] >= 0, f"no swap is reported: {reply}")
                    replies = streams.end(150)
                    check_same(answers(server, 320, (2, 40)), fresh[0], f"tp {ranks}, after {count} updates")
                    stalls = [update["stall_ms"] for update in last_updates(server, count)]
                    check(all(stall is None for stall in stalls), f"an update stopped generation: {stalls}")
                    server.post(
                        "/update_weights_from_disk", dict(model_path=str(folders[1]), weight_version="x", swap="demand")
                    )
                    check_same(answers(server, 320, (2, 40)), fresh[1], f"tp {ranks}, one more")
                    # A write in place is behind in the other set, which the next update catches up.
                    server.post(
                        "/update_weights_from_disk",
                        dict(model_path=str(folders[0]), weight_version="y", swap="in_place"),
                    )
                    check_same(answers(server, 320, (2, 40)), fresh[0], f"tp {ranks}, in place")
                spans = [[span["version"] for span in reply["meta_info"]["weight_versions"]] for reply in replies]
                spread = max(spread, *map(len, spans))
            return f"a request had {spread} versions"

    return run


for architecture in ["qwen3", "qwen3-moe", "olmo2"]:
    test(f"shadow/while-requests-run/{architecture}")(while_requests_run(architecture))


@test("shadow/finish-old")
def finish_old(options):
    """Requests that have started finish on the weights before an update, bit for bit as without one."""
    length = 400
    with room(options) as place:
        folders = [GOLDENS / "qwen3", models.reseeded(GOLDENS / "qwen3", place / "second", 7)]
        [prompt] = prompts(3, (50,), 320)
        for ranks in (1, 2):
            with shadowed(options, ranks, folders[0], "--model-root", place) as server:

                def generate(replies):
                    sampling = dict(max_new_tokens=length, temperature=0, ignore_eos=True)
                    replies.append(server.post("/generate", dict(input_ids=prompt, sampling_params=sampling), 120))

                def update(turn, **fields):
                    body = dict(model_path=str(folders[turn % 2]), swap="demand", weight_version=str(turn), **fields)
                    server.post("/update_weights_from_disk", body)

                expected, finished = [], 0
                for turn in (1, 0):
                    update(turn)
                    replies = []
                    generate(replies)
                    expected.insert(0, replies[0]["output_ids"])
                check(expected[0] != expected[1], "the two models answer alike")
                # Alone, all steps of a request have one sequence, so that its tokens do not depend on others.
                for turn in range(1, 7):
                    replies, running = [], threading.Thread(target=lambda: generate(replies))
                    running.start()
                    while server.metric("refit:num_requests_running") == 0:
                        time.sleep(0.002)
                    update(turn, on_running="finish_old")
                    finished += server.get("/server_info")["weight_sets"]["old_requests"]
                    running.join()
                    [reply] = replies
                    spans = [span["version"] for span in reply["meta_info"]["weight_versions"]]
                    check(spans == [str(turn - 1)], f"tp {ranks}, turn {turn}: versions {spans}")
                    check(reply["output_ids"] == expected[(turn - 1) % 2], f"tp {ranks}, turn {turn}: another answer")
                check(finished >= 3, f"only {finished} of 6 requests outlasted their update")
                # Amid others: each request is of one version.
                streams = Streams(server, 6, 150, 320)
                for turn in range(7, 19):
                    update(turn, on_running="finish_old")
                replies = streams.end(150)
                spans = {len(reply["meta_info"]["weight_versions"]) for reply in replies}
                check(spans == {1}, f"tp {ranks}: requests of {spans} versions")
                used = {reply["meta_info"]["weight_versions"][0]["version"] for reply in replies}
                check(len(used) > 3, f"tp {ranks}: only the versions {used} were used")
                replies = []
                generate(replies)
                check(replies[0]["output_ids"] == expected[0], f"tp {ranks}: another answer after all updates")


@test("shadow/tensors")
def tensors(options):
    """From the memory of a trainer: parts of the model, handles that lie, and memory that is overwritten at once."""
    kind, ranks = "qwen3", 2
    sender, shapes = sender_of(options, kind), shapes_of(kind)
    sums = {variant: sender("sums", variant=variant) for variant in (1, 2)}
    sender("make", variant=0)
    with shadowed(options, ranks, GOLDENS / kind) as server:
        streams = Streams(server, 4, 100, 320)
        for turn, variant in enumerate((1, 2, 1, 1, 2, 1)):
            sender("fill", variant=variant)
            way = ("list", "verl-one-by-one", "list")[turn % 3]
            post(server, sender("pack", way=way, ranks=ranks), swap="demand", weight_version=str(turn))
            sender("spoil")
            check_sums(server, sums[variant], variant, shapes, f"turn {turn}, {way}")
            check_given_back(sender, way)
        if options.device != "cpu":
            for lie in ("handle", "beyond", "counter"):
                sender("fill", variant=2)
                try:
                    said = post(server, [dict(serialized_named_tensors=[sender("pack_lie", lie=lie)] * ranks)])
                    raise AssertionError(f"a lie ({lie}) was taken: {said}")
                except Refused:
                    check_sums(server, sums[1], 1, shapes, f"after a lie ({lie})")
        streams.end(100)
        check(server.metric("refit:weights_torn") == 0, "something is torn")


@test("shadow/sleep")
def sleep(options):
    """The second set gives its memory back first, and is there again for the next update."""
    with room(options) as place:
        folders = [GOLDENS / "qwen3", models.reseeded(GOLDENS / "qwen3", place / "second", 7)]
        prompt = prompts(3, (50,), 320)
        with shadowed(options, 1, folders[0], "--model-root", place) as server:
            expected = [server.generate(prompt, 16)]
            update = "/update_weights_from_disk"
            server.post(update, dict(model_path=str(folders[1]), swap="demand"))
            expected.append(server.generate(prompt, 16))
            for turn in range(6):
                server.post("/release_memory_occupation", {})
                sets = server.get("/server_info")["weight_sets"]
                check(sets["shadow"]["state"] == "absent", f"asleep, the second set is {sets}")
                server.post("/resume_memory_occupation", {})
                server.post(update, dict(model_path=str(folders[turn % 2]), swap="in_place"))
                check(server.generate(prompt, 16) == expected[turn % 2], f"another answer in turn {turn}")
                server.post(update, dict(model_path=str(folders[1 - turn % 2]), swap="demand"))
                check(server.generate(prompt, 16) == expected[1 - turn % 2], f"another answer in turn {turn}, swapped")
