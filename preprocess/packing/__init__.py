"""The code for packing: the plan, the decoding pipeline, the shard writer, and the journal of an interrupted pack."""
