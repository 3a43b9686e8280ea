"""A self-contained HTML page about one or several runs, made from their folders."""
