"""Runs as files: records and timings as they are written; several runs as one: resumed, in shards, merged, compared."""
