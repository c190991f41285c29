"""A trainer with vLLM's own trainer engines. Commands and replies are lines of JSON."""

import dataclasses
import functools

import released
import requests
import torch

released.vllm(on_gpu=torch.cuda.is_available())

from answering import answer  # noqa: E402
from tensors import coded  # noqa: E402
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource  # noqa: E402
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # noqa: E402
from vllm.distributed.weight_transfer.ipc_engine import (  # noqa: E402
    IPCTrainerInitInfo,
    IPCTrainerWeightTransferEngine,
)
from vllm.distributed.weight_transfer.nccl_engine import (  # noqa: E402
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)


class Client(HTTPVLLMWeightSyncClient):
    """vLLM's client. The bodies are kept for the test."""

    updates = []

    def update_weights(self, update_info):
        self.updates.append(update_info)
        super().update_weights(update_info)


class GlooClient(Client):
    """refit joins a gloo group, because there are no GPUs."""

    def init_weight_transfer_engine(self, init_info):
        super().init_weight_transfer_engine({**init_info, "backend": "gloo"})


class Weights(WeightSource):
    """Position-coded tensors of one variant, which the test changes between two updates."""

    def __init__(self, shapes, device):
        self.shapes, self.device, self.variant = shapes, device, 0

    @functools.cached_property
    def metadata(self):
        return [ParamMeta(name, coded(0, name, shape).dtype, tuple(shape)) for name, shape in self.shapes]

    def iter_full(self):
        for name, shape in self.shapes:
            yield name, coded(self.variant, name, shape).to(self.device)


class Trainer:
    def join(self, url, shapes, world, **wire):
        """Over gloo, from memory of the CPU."""
        released.gloo_for_nccl()
        self.open_group(GlooClient(url), Weights(shapes, "cpu"), world, wire)

    def join_by_nccl(self, url, shapes, world, **wire):
        """From the first GPU; the engine's ranks have others."""
        self.open_group(Client(url), Weights(shapes, "cuda:0"), world, wire)
        group, group.sent = self.engine.model_update_group, []
        broadcast = group.broadcast

        def counted(tensor, *args, **fields):
            group.sent.append(tensor.numel() * tensor.element_size())
            broadcast(tensor, *args, **fields)

        group.broadcast = counted

    def open_group(self, client, weights, world, wire):
        self.client, self.weights = client, weights
        info = NCCLTrainerInitInfo(
            rank=0, master_address="127.0.0.1", master_port=released.free_port(), world_size=world, **wire
        )
        self.engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=weights)

    def join_by_ipc(self, url, shapes, **wire):
        self.client, self.weights = Client(url), Weights(shapes, "cuda:0")
        info = IPCTrainerInitInfo(rank=0, **wire)
        self.engine = IPCTrainerWeightTransferEngine.trainer_init(info, client=self.client, source=self.weights)

    def send_by_ipc(self, variant):
        """One update by the engine's own send_weights: the number of requests and of tensors in them."""
        self.weights.variant = variant
        self.client.updates.clear()
        self.engine.send_weights()
        return dict(requests=len(self.client.updates), names=sum(len(body["names"]) for body in self.client.updates))

    def send(self, variant):
        """One update by the engine's own send_weights: how many names it announced, and the sizes of the broadcasts."""
        self.weights.variant = variant
        self.engine.model_update_group.sent.clear()
        self.engine.send_weights()
        return dict(names=len(self.client.updates[-1]["names"]), sizes=self.engine.model_update_group.sent)

    def repeat(self):
        """The client's requests of an update that announces nothing, without a broadcast: how it is refused."""
        self.client.start_weight_update()
        try:
            self.client.update_weights(dataclasses.asdict(NCCLWeightTransferUpdateInfo()))
        except requests.HTTPError as error:
            return dict(status=error.response.status_code, text=error.response.text)
        return None

    def shutdown(self):
        self.client.shutdown_weight_transfer_engine()
        self.engine.shutdown()


if __name__ == "__main__":
    answer(Trainer())
