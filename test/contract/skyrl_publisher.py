"""SkyRL's trainer as a publisher of checkpoint deltas, in the format of weight_sync/delta_checkpoint.py."""

import json

import numpy as np
import safetensors.torch
import torch
import zstandard

import published
from published import CHECKSUMS, data_of


class Publisher(published.Publisher):
    """The base checkpoint is the one at base_model_path."""

    def __init__(self, sync_dir, max_file_bytes=2000, checksum="xxh3-128"):
        super().__init__()
        self.sync_dir, self.max_file_bytes, self.checksum = sync_dir, max_file_bytes, checksum

    def init_info(self, local, base=None):
        return dict(
            base_model_path=str(base or self.base),
            local_checkpoint_dir=str(local),
            cloud_download_workers=4,
            checkpoint_load_format="vllm_multi_thread_safetensors",
            multi_thread_safetensors_max_workers=8,
        )

    def publish(self, new=None, edit=lambda manifest: None):
        """Publishes a version, its manifest last. Returns the fields of /fetch_weights and /update_weights for it."""
        new = new or self.next()
        self.version += 1
        folder = self.sync_dir / f"delta-{self.version:08d}"
        folder.mkdir(parents=True)
        records, files, held, size = [], [], {}, 0

        def flush():
            nonlocal held, size
            if held:
                files.append(name_of_file())
                safetensors.torch.save_file(held, folder / files[-1])
            held, size = {}, 0

        def name_of_file():
            return f"delta-rank00000-file{len(files):06d}.safetensors"

        for name, tensor in new.items():
            data, old = data_of(tensor), data_of(self.snapshot[name])
            if data == old:
                continue
            diff = np.frombuffer(data, np.uint8) ^ np.frombuffer(old, np.uint8)
            packed = zstandard.ZstdCompressor(level=1).compress(diff.tobytes())
            if held and size + len(packed) > self.max_file_bytes:
                flush()
            held[name] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
            size += len(packed)
            sums = dict(checksum=CHECKSUMS[self.checksum](data), checksum_algorithm=self.checksum)
            records.append(
                dict(
                    name=name,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=list(tensor.shape),
                    uncompressed_num_bytes=len(data),
                    compressed_num_bytes=len(packed),
                    payload_file=name_of_file(),
                    payload_key=name,
                    **sums,
                )
            )
        flush()
        manifest = dict(
            version=self.version,
            base_version=self.version - 1,
            tensors=records,
            total_uncompressed_num_bytes=sum(r["uncompressed_num_bytes"] for r in records),
            total_compressed_num_bytes=sum(r["compressed_num_bytes"] for r in records),
            payload_files=files,
        )
        edit(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        self.snapshot = new
        return self.told()

    def told(self):
        return dict(
            target_version=self.version,
            version=self.version,
            sync_dir=str(self.sync_dir),
            uri=f"{self.sync_dir}/delta-{self.version:08d}",
        )
