"""The training engine: image order, infeed, compiled training program, outfeed, and the commands that use them."""
