"""The code for packing: plan, decoding pipeline, shard writer, and a journal for resuming after an interruption."""
