"""Packing: the plan, the decoding pipeline, the shard writer, and the journal for resuming after an interruption."""
