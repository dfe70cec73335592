"""From documents in a data set to packs: views, written sets, streams and samplers."""

from hf_neat_packing.dataset.pack import nest_flat_packs, pack_dataset
from hf_neat_packing.dataset.packed_dataset import PackedDataset

__all__ = ["PackedDataset", "nest_flat_packs", "pack_dataset"]
