"""Writing shards: the plan, the pipeline that decodes, the writer, and the journal that lets a pack continue."""
