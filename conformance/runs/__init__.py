"""Several runs as one: resumed, split into shards, merged again, compared by what they were made with."""
