"""A trainer with SGLang's own client of its HTTP server. Commands and replies are lines of JSON."""

import released

released.sglang()

import torch.multiprocessing  # noqa: E402
from answering import answer  # noqa: E402
from sglang.srt.entrypoints import http_server_engine  # noqa: E402
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket  # noqa: E402
from tensors import coded  # noqa: E402

# A server is not a child of the sender, so CPU tensors are shared by file name.
torch.multiprocessing.set_sharing_strategy("file_system")
# The server runs already.
http_server_engine.launch_server_process = lambda _: None


class Trainer:
    def start(self, url, ranks, shapes):
        self.shapes = shapes
        self.engine = http_server_engine.HttpServerEngineAdapter(url=url, tp_size=ranks)

    def tensors(self, variant):
        # The memory lives until the next update: a server reads it before it replies.
        self.sent = [(name, coded(variant, name, shape)) for name, shape in self.shapes]
        return self.sent

    def update(self, variant, parts=1):
        """The tensors in as many requests, between begin and end."""
        tensors = self.tensors(variant)
        self.engine.begin_weight_update()
        for part in range(parts):
            self.engine.update_weights_from_tensor(tensors[part::parts])
        return self.engine.end_weight_update()

    def update_by_bucket(self, variant):
        bucket = FlattenedTensorBucket(named_tensors=self.tensors(variant))
        self.bucket = dict(flattened_tensor=bucket.get_flattened_tensor(), metadata=bucket.get_metadata())
        return self.engine.update_weights_from_tensor(self.bucket, load_format="flattened_bucket")

    def generate(self, **fields):
        return self.engine.generate(**fields)

    def sleep_and_wake(self):
        return [self.engine.release_memory_occupation(), self.engine.resume_memory_occupation()]


if __name__ == "__main__":
    answer(Trainer())
