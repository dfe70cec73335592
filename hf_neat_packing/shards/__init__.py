"""Tokenized parquet shards in, packed parquet out, on as many workers as there are (Ray Data)."""

from hf_neat_packing.shards.pipeline import PackedShards, pack_shards

__all__ = ["PackedShards", "pack_shards"]
