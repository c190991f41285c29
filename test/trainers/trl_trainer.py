"""A trainer with TRL's own clients: the one of GRPO and the one of asynchronous GRPO. Commands and replies are JSON."""

import released

released.trl()

from answering import answer  # noqa: E402
from tensors import coded  # noqa: E402
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient  # noqa: E402
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402


def with_gloo(info):
    return {**info, "backend": "gloo"}


class SyncClient(VLLMClient):
    """TRL's client. refit joins a gloo group, because there are no GPUs."""

    def _post(self, url, json=None, **more):
        if json is not None and "init_info" in json:
            json = dict(init_info=with_gloo(json["init_info"]))
        return super()._post(url, json=json, **more)


class GlooAsyncClient(AsyncClient):
    def init_weight_transfer_engine(self, init_info, **more):
        super().init_weight_transfer_engine(with_gloo(init_info), **more)


class Trainer:
    def sync(self, url, shapes):
        """As trl.generation.vllm_generation begins in server mode."""
        self.shapes = shapes
        self.client = SyncClient(base_url=url, group_port=released.free_port(), connection_timeout=60)
        self.client.init_communicator(device="cuda:0")

    def asynchronous(self, url, shapes):
        self.shapes = shapes
        self.vllm = GlooAsyncClient(url, server_timeout=60)
        names = [name for name, _ in shapes]
        announced = dict(names=names, dtype_names=["bfloat16"] * len(names), shapes=[shape for _, shape in shapes])
        self.transfer = WeightTransferClient(self.vllm, announced)
        self.transfer.init_weight_transfer()
        config = self.vllm.get_server_info()
        return dict(
            dtype=self.vllm.get_dtype(),
            length=self.vllm.get_max_model_len(),
            lora=config["lora_config"],
            replicas=config["parallel_config"]["data_parallel_size"],
        )

    def weights(self, variant):
        return ((name, coded(variant, name, shape)) for name, shape in self.shapes)

    def update(self, variant):
        metadata = [(name, "bfloat16", shape) for name, shape in self.shapes]
        self.client.update_named_params(metadata, self.weights(variant))
        self.client.reset_prefix_cache()

    def one_by_one(self, variant):
        with self.client.weight_update():
            for name, tensor in self.weights(variant):
                self.client.update_named_param(name, tensor)

    def send(self, variant):
        """As the asynchronous trainer: frozen requests continue under the new weights."""
        self.transfer.pause()
        self.transfer.send_weights(self.weights(variant))
        self.transfer.resume()

    def generate(self, prompts):
        return self.client.generate(prompts, n=2, max_tokens=4, temperature=1.0, logprobs=0)

    def scores(self, sequences, lengths):
        return self.client.get_sequence_logprobs(sequences, lengths, top_logprobs=3)


if __name__ == "__main__":
    answer(Trainer())
